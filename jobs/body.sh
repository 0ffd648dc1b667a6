# ---------------------------------------------------------------- the run; nothing below depends on the site

cd @folder@ || exit 2
export OMP_NUM_THREADS=@cores@

@supervisor@"${LAUNCH[@]}" mpitrain run "${ARGUMENTS[@]}" &
ranks=$! asked=yes cancelled=
trap 'asked=yes; kill -USR1 "$ranks"' USR1                # stop with a checkpoint, and restart
trap 'asked=yes cancelled=yes; kill -USR1 "$ranks"' TERM  # and don't
while [ "$asked" ]; do # a signal ends `wait`, not what it waits for
    asked=
    wait "$ranks"
    code=$?
done
again() { # restart? Where a rank called exit(0), the run isn't done though mpirun ended with 0: the job failed
    mpitrain job again "$code" "${ARGUMENTS[@]}" --most @most@
    local verdict=$?
    [ "$code" -eq 0 ] && [ "$verdict" -ne 1 ] && code=1
    return "$verdict"
}
