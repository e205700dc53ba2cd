"""Figures of measured data, with a text for those who cannot see them."""

from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_figure(figure: "Figure", *, alt: str, look: str) -> None:
    """Show `figure` with the text `alt` in its place where it cannot be seen, and what to look for.

    Both are one line: `alt` says what is drawn, `look` what to look for.
    """
    for name, line in {"alt": alt, "look": look}.items():
        if not line or "\n" in line:
            raise ValueError(f"{name} must be one line of text, not {line!r}")
    # Here, as the ranks of an exercise import this module too, and draw nothing.
    import matplotlib.pyplot as plt
    from IPython.display import display

    image = BytesIO()
    figure.savefig(image, format="png", dpi=100, bbox_inches="tight", facecolor="white")
    plt.close(figure)
    display(
        {"image/png": image.getvalue(), "text/plain": alt},
        metadata={"image/png": {"alt": alt}},
        raw=True,
    )
    display({"text/plain": f"Look for: {look}"}, raw=True)  # printed, it would come above it
