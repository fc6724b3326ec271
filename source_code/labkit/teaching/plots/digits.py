# SPDX-License-Identifier: BSD-3-Clause
"""Draw digits of MNIST."""

import matplotlib.pyplot as plt

from labkit.teaching.plots import show


def row(images, labels, under: str):
    """Draw a row of images (uint8, 28 × 28), each below its label. under: name of the data set."""
    figure, panels = plt.subplots(1, len(images), figsize=(10, 1.5), layout="constrained")
    for axes, image, label in zip(panels, images, labels, strict=True):
        axes.imshow(image, cmap="gray_r")
        axes.set_title(int(label), loc="center")
        axes.set_axis_off()
    figure.supxlabel(under, fontsize=11, x=0.01, ha="left")
    show(figure, alt=f"{under}: the digits {', '.join(str(int(label)) for label in labels)}")
