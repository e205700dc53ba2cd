"""Figures of measured data, with a text for those who cannot see them."""

from html import escape
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def show_figure(figure: "Figure", *, alt: str, look: str) -> None:
    """Show `figure`, what to look for in it, and, folded, the figure in words.

    Both texts are one line: `look` says what to look for, `alt` what there is to see, for those
    who cannot. JupyterLab shows no alternative text of an image, so it stands below it as well.
    """
    for name, line in {"alt": alt, "look": look}.items():
        if not line or "\n" in line:
            raise ValueError(f"{name} must be one line of text, not {line!r}")
    # Here, as every rank imports this module, and draws nothing.
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
    words = f"<details><summary>The figure in words</summary>{escape(alt)}</details>"
    below = {"text/html": f"Look for: {escape(look)}{words}", "text/plain": f"Look for: {look}"}
    display(below, raw=True)  # printed, it would come above the figure
