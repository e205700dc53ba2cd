"""Typical wrong answers to the exercise of chapter 02, and words of the hint each must get."""


def returns_numbers(rank, world_size, port):
    return {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}


def names_another_machine(rank, world_size, port):
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "ddp.invalid",
        "MASTER_PORT": str(port),
    }


MISTAKES = {
    "environment_for": [
        (returns_numbers, "environment variables are text"),
        (names_another_machine, "did not meet at MASTER_ADDR 'ddp.invalid'"),
    ],
}
