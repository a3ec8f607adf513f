#!/bin/sh
# The embedded drafts, on one GPU: benchmarks/train_pycoder.sh WORK STAGE...
#
# Stages: prepare (the corpus), EAGLE3, EAGLE, STANDALONE, DFLASH, DSPARK, pack (results into $OUT
# or WORK/out).
# MINUTES_<ALGORITHM> sets a training's length; a run whose state is in WORK goes on where it ended.
# LENGTH sets that of its texts: block drafts draft badly behind longer ones than they know.
# INITIAL=1 begins with the embedded draft's weights, which may have fewer layers (LAYERS) or
# another Markov head (MARKOV).
set -eu
work=$1
shift
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here/src${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=true
mkdir -p "$work"

draft() { echo "$work/pycoder-11m-$(echo "$1" | tr '[:upper:]' '[:lower:]')"; }

train() { # ALGORITHM MINUTES LENGTH BATCH flags...
    algorithm=$1
    minutes=$2
    length=${LENGTH:-$3}
    batch=${BATCH:-$(($4 * $3 / length))} # as many tokens a step, however long the texts
    shift 4
    folder=$(draft "$algorithm")
    prompts="48 64 80 96 128 160 192 224 320"
    [ "${INITIAL:-0}" != 1 ] ||
        set -- --initial-draft "$here/models/$(basename "$folder")" --matrix-lr 0.01 "$@"
    [ ! -f "$folder/training.pt" ] || set -- --resume "$@"
    # Rows of another length are refused: a folder for each.
    "$python" -m outrider train --algorithm "$algorithm" --model "${MODEL:-pycoder}" \
        --data "$work/corpus/train.npy" --selection-data "$work/corpus/selection.npy" \
        --output "$folder" --on-policy-cache "$work/rows-$length" --on-policy-source dense \
        --on-policy-rows "${ROWS:-40960}" --on-policy-share 0.9 \
        --sequence-length "$length" --batch-size "$batch" \
        --on-policy-tokens "${OWN:-128}" --on-policy-prompts ${PROMPTS:-$prompts} \
        --selection-rows "${SELECTION:-512}" \
        --log-every 50 --selection-every 1000 --minutes "$minutes" --no-measure "$@" ${FLAGS:-}
}

block() { # ALGORITHM MINUTES flags...: layers of one size for both, 5.9 MB
    algorithm=$1
    minutes=$2
    shift 2
    train "$algorithm" "$minutes" 1024 24 --num-hidden-layers "${LAYERS:-4}" \
        --intermediate-size "${WIDTH:-592}" --feature-layers 2 4 6 8 11 --anchors "${ANCHORS:-128}" "$@"
}

for stage; do
    began=$(date +%s)
    case $stage in
    prepare)
        [ -f "$work/corpus/corpus.json" ] || "$python" "$here/benchmarks/python_corpus.py" \
            --tokenizer "$here/models/pycoder-11m/tokenizer.json" \
            --output "$work/corpus" --megabytes "${MEGABYTES:-200}"
        ;;
    EAGLE3)
        train EAGLE3 "${MINUTES_EAGLE3:-9.7}" 1024 48 --intermediate-size 1536 \
            --num-attention-heads 8 --num-key-value-heads 4 --feature-layers 2 4 6 8 11
        ;;
    EAGLE) train EAGLE "${MINUTES_EAGLE:-6.2}" 1024 48 --intermediate-size 2048 ;;
    STANDALONE)
        train STANDALONE "${MINUTES_STANDALONE:-2.5}" 512 128 --hidden-size 128 \
            --num-hidden-layers 2 --intermediate-size 384
        ;;
    DFLASH) block DFLASH "${MINUTES_DFLASH:-10.5}" --block-size 8 ;;
    DSPARK)
        block DSPARK "${MINUTES_DSPARK:-10.3}" --block-size 7 --markov-rank 32 \
            --markov-head "${MARKOV:-rnn}"
        ;;
    pack)
        out=${OUT:-$work/out}
        mkdir -p "$out"
        for folder in "$work"/pycoder-11m-*; do
            name=$(basename "$folder")
            tar -C "$work" --exclude=training.pt --exclude=rows -czf "$out/$name.tar.gz" "$name"
            cp "$folder/training.pt" "$out/$name-training.pt"
        done
        cp "$work/corpus/corpus.json" "$out/corpus.json"
        ;;
    *)
        echo "unknown stage: $stage" >&2
        exit 2
        ;;
    esac
    echo "$stage: $(($(date +%s) - began)) s" >&2
done
