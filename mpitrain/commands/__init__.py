"""What each command does, but for `run`.

inspect (program, check, memory)   schedule/   verify   generate   doctor   ckpt/   job/   dryrun/
"""
