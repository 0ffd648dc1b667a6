# ---------------------------------------------------------------- the run; nothing below depends on the site

cd @folder@ || exit 2
export OMP_NUM_THREADS=@cores@

"${LAUNCH[@]}" mpitrain run "${ARGUMENTS[@]}" &
ranks=$! asked=yes cancelled=
trap 'asked=yes; kill -USR1 "$ranks"' USR1                # leave with a checkpoint, and come again
trap 'asked=yes cancelled=yes; kill -USR1 "$ranks"' TERM  # and don't
while [ "$asked" ]; do # a signal ends `wait`, not what it waits for
    asked=
    wait "$ranks"
    code=$?
done
