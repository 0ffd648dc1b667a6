"""Checkpoints in plain HDF5: saved by any number of writers, read by any number of ranks in any other layout.

    checkpoints/
        step-00000020/
        step-00000030/
            shard-00000.h5  what writer 0 held: one contiguous dataset per array, or per part of one
                            (shards.py has the names)
            shard-00001.h5  ...
            index.h5        every array as one virtual dataset, who wrote it, the shards with sizes,
                            all digests (FORMAT.md)
            index.xxh3      digest of index.h5, in the form that `xxh128sum -c` reads
        step-00000040.tmp/     being written, or left by a killed run: not a checkpoint

Saving takes three calls with a barrier after each of the first two; loading, one rank that decides
and a broadcast of the step:

    save.begin(folder, step)    one rank      load.open_latest(folder)      one rank: verifies, picks
    save.write_shard(tmp, ...)  every writer  load.open_step(folder, step)  the others
    save.commit(tmp, meta)      one rank      checkpoint.read(name, rows)   every rank, only what it needs

save, load             writing a step; finding the newest one that is whole
reader                 one step, open for reading
index, shards          the files of a step, and how an array is put together from them
folders, retention     names of steps, and the rename by which one exists; which steps are kept
recorded_metrics       metrics of steps in files beside the checkpoints
steps                  which step of which folder a path means
verify, verify_shared  a step held against its digests, by one process or by all ranks
repair, reshard        an index that is written anew; a step in another number of files
differences            what differs between two steps
arrays, boxes          a logical array and its digests; boxes of its index space
dtypes, tensors        dtypes in HDF5; torch's tensors as arrays
meta                   what a step says of its run besides arrays
files                  HDF5 files that are created and synced safely
hdf5, hdf5_bytes, hdf5_links, hdf5_virtual, lookup3
                       a reader of HDF5 for files of strangers, and HDF5's own checksum

A step may come from a stranger. It is read without the HDF5 library (hdf5.py), and whatever
mpitrain doesn't write is refused; h5py writes, and other programs read as they like. No MPI here:
the caller does the barriers.
"""
