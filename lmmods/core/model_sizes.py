"""The size of a network in words, and the arithmetic of training it, counted alike on both engines."""


def describe_sizes(num_params: int, num_trainable: int, by_type: dict[str, int]) -> str:
    """Parameters and the types they are stored in, in a line."""
    share = ", ".join(f"{name} {count / num_params:.1%}" for name, count in by_type.items())
    return (f"Parameters: {num_params:,}, of which {num_trainable:,} train ({num_trainable / num_params:.2%}). "
            f"Stored as: {share}.")


def flops_per_token(num_params: int, num_trainable: int, num_looked_up: int) -> int:
    """Arithmetic of one training token: 2 per weight forward, 2 backward, 2 more per weight that trains.

    Attention scores are left out, as is usual (Kaplan et al. 2020), and so is an embedding that is only looked up.

    Args:
        num_looked_up: Parameters of an embedding that is not also the output layer.
    """
    return 4 * (num_params - num_looked_up) + 2 * num_trainable
