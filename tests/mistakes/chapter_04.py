"""Typical wrong answers to the exercise of chapter 04, each with words of its hint."""

MISTAKES = {
    "device_index": [
        (
            lambda rank, local_rank, visible: rank % visible,
            "with --distribution=cyclic, ranks 0 and 2 are on one node and share",
        ),
        (
            lambda rank, local_rank, visible: local_rank,
            "with --gpus-per-task=1, rank 1 (local rank 1) takes index 1",
        ),
    ]
}
