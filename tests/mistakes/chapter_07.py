"""Typical wrong answers to the exercises of chapter 07, each with words of its hint."""


def goes_round_once(parameters, world_size, backward):
    return 4 * parameters * (world_size - 1) / world_size / backward * 8 / 1e9


def answers_in_gigabytes(parameters, world_size, backward):
    return 4 * parameters * 2 * (world_size - 1) / world_size / backward / 1e9


MISTAKES = {
    "break_even_gigabits": [
        (goes_round_once, "goes round the ring twice"),
        (answers_in_gigabytes, "a byte has 8 bits"),
    ],
}
