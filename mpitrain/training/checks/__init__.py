"""What a run checks while it trains: silent data corruption, loss spikes, stragglers.

rerun, replicas, digests    a step computed twice; the weights of replicas compared, bit for bit
spikes                      a loss that jumps: skip the step, or roll back
stragglers                  slow ranks and links, by name
one_rank                    a small copy of the model, trained in a layout and on one rank
comm_report                 bytes and waits of each communicator
checks                      which of them a step gets
"""
