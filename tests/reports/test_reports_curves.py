"""Curves of known values, dot by dot in the terminal and pixel by pixel in the PNG."""

import io
import struct
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from rolltree.evaluation import Estimate
from rolltree.reports import Curve, CurveView, save_curve, terminal_curve
from rolltree.reports.curves import smooth


def plot(curve, width=10, height=4):
    """Return the plot area as rows of exactly `width` characters."""
    lines = terminal_curve(curve, width=width, height=height).splitlines()
    return [line.partition("┤")[2].ljust(width) for line in lines[1 : height + 1]]


def dots(row):
    """Return the dots of a row of Braille characters as four rows of zeros and ones."""
    bits = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
    codes = [0 if cell == " " else ord(cell) - 0x2800 for cell in row]
    return [[int(bool(code & bit)) for code in codes for bit in pair] for pair in bits]


def grid(curve, width=10, height=4):
    """Return the dots of the plot, an array `[4 * height, 2 * width]`, the top row first."""
    return np.array([line for row in plot(curve, width, height) for line in dots(row)])


def estimate(mean, low=None, high=None):
    return Estimate(mean, low, high, "t", 5, 5)


class TestTerminal:
    @pytest.mark.parametrize(("columns", "width"), [(60, 51), (140, 131), (400, 160), (12, 10)])
    def test_it_is_as_wide_as_the_terminal(self, columns, width):
        console = Console(width=columns, file=io.StringIO())
        console.print(CurveView(Curve("t", [1, 2], [0.5, 1.0])))
        lines = console.file.getvalue().splitlines()
        # A terminal that is too narrow for any curve cuts it.
        assert (
            lines[-2].strip()
            == ("\N{BOX DRAWINGS LIGHT UP AND RIGHT}" + "─" * width)[: columns - 8]
        )

    def test_a_constant_line_is_one_row_of_dots(self):
        found = grid(Curve("t", [0, 5, 10], [1.0, 1.0, 1.0]))
        assert found[0].all()
        assert not found[1:].any()
        zero = grid(Curve("t", [0, 10], [0.0, 0.0]))
        assert zero[-1].all()
        assert not zero[:-1].any()

    def test_the_diagonal_of_a_square_is_a_diagonal(self):
        # 16 dots wide and 16 high: step i of 16 lands on dot (i, 15 - i).
        steps = range(16)
        found = grid(Curve("t", steps, [step / 15 for step in steps]), width=8, height=4)
        assert np.array_equal(found, np.eye(16, dtype=int)[::-1])

    def test_half_of_the_way_is_half_of_the_height(self):
        found = grid(Curve("t", [0, 1, 2], [0.0, 1.0, 0.0]), width=8, height=4)
        peak = found.argmax(axis=0)  # the highest dot of every column
        assert peak.tolist() == [15, 13, 11, 9, 7, 5, 3, 1, 0, 2, 4, 6, 8, 10, 12, 14]

    @pytest.mark.parametrize(
        ("values", "ticks"),
        [
            ([0.2, 0.8], ["1.00", "0.50", "0.00"]),  # rewards in the unit: its whole range
            ([0.0, 0.4], ["0.40", "0.20", "0.00"]),
            ([-1.0, 3.0], ["3.00", "1.00", "-1.00"]),
            ([2.0, 2.0], ["2.00", "1.00", "0.00"]),
            ([0.0, 0.0], ["1.00", "0.50", "0.00"]),
            ([-2.0, -1.0], ["-1.00", "-1.50", "-2.00"]),
        ],
    )
    def test_the_axis(self, values, ticks):
        lines = terminal_curve(Curve("t", [1, 2], values), width=10, height=4).splitlines()
        labels = [line.partition("┤")[0].strip() for line in lines[1:5]]
        assert [label for label in labels if label] == ticks
        assert labels[1] == ""

    def test_steps_stand_below_their_places(self):
        lines = terminal_curve(Curve("t", [5, 120], [0, 1]), width=12, height=3).splitlines()
        assert lines[-2] == " " * 8 + "└" + "─" * 12
        assert lines[-1] == " " * 9 + "5" + "   step 120"
        assert len(lines[-1]) == len(lines[-2])

    def test_one_point_is_one_dot(self):
        found = grid(Curve("t", [7], [0.6]))
        assert found.sum() == 1
        assert np.argwhere(found).tolist() == [[6, 0]]  # 0.4 from the top of 15 dots

    def test_held_out_points_lie_over_the_line(self):
        curve = Curve("t", [0, 10], [0.5, 0.5], [(0, estimate(0.5)), (10, estimate(1.0))])
        rows = plot(curve)
        assert [row[0] for row in rows] == [" ", " ", "o", " "]
        assert rows[0][-1] == "o"
        assert terminal_curve(curve).splitlines()[0] == "t   (o: held out)"

    def test_held_out_points_alone(self):
        rows = plot(Curve("t", [], [], [(3, estimate(0.75))]))
        assert sum(row.count("o") for row in rows) == 1
        assert all(set(row) <= {"o", " "} for row in rows)

    @settings(max_examples=50)
    @given(st.lists(st.floats(0, 1), min_size=2, max_size=40), st.integers(2, 40))
    def test_the_line_has_no_gaps(self, values, width):
        found = grid(Curve("t", range(len(values)), values), width=width, height=6)
        assert found.any(axis=0).all()
        for left, right in zip(found.T, found.T[1:], strict=False):
            one, two = np.flatnonzero(left), np.flatnonzero(right)
            assert min(abs(one[:, None] - two[None, :]).ravel()) <= 1

    def test_steps_and_rewards_must_match(self):
        with pytest.raises(ValueError, match="zip"):
            terminal_curve(Curve("t", [1, 2], [0.5]))


class TestSmooth:
    @pytest.mark.parametrize(
        ("values", "width", "expected"),
        [
            ([4.0], 5, [4.0]),
            ([0.0, 1.0], 5, [0.0, 0.5]),
            ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], 5, [1.0, 1.5, 2.0, 2.5, 3.0, 4.0]),
            ([1.0, 5.0], 1, [1.0, 5.0]),
        ],
    )
    def test_by_hand(self, values, width, expected):
        assert smooth(values, width) == expected

    @given(st.lists(st.floats(-10, 10), min_size=1), st.integers(1, 8))
    def test_it_stays_between_the_least_and_the_greatest(self, values, width):
        for end, value in enumerate(smooth(values, width), start=1):
            window = values[max(0, end - width) : end]
            assert min(window) - 1e-9 <= value <= max(window) + 1e-9


def pixels(path):
    """Return a PNG's pixels, uint8 `[height, width, channels]` (8 bits, no interlacing)."""
    data = path.read_bytes()
    width, height, depth, kind = struct.unpack(">IIBB", data[16:26])
    assert (depth, kind) in ((8, 2), (8, 6))
    channels = 3 if kind == 2 else 4
    body, at = b"", 8
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body += data[at + 8 : at + 8 + size] if name == b"IDAT" else b""
        at += size + 12
    raw = np.frombuffer(zlib.decompress(body), np.uint8).reshape(height, 1 + width * channels)
    image = np.zeros((height, width * channels), np.uint8)
    above = np.zeros(width * channels, np.uint8)
    for number, line in enumerate(raw):
        above = image[number] = unfiltered(int(line[0]), line[1:].copy(), above, channels)
    return image.reshape(height, width, channels)


def unfiltered(kind, line, above, step):
    if kind in (0, 2):
        return line + above if kind == 2 else line
    for x in range(len(line)):
        left, corner = (line[x - step], above[x - step]) if x >= step else (0, 0)
        a, b, c = int(left), int(above[x]), int(corner)
        nearest = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
        line[x] = (int(line[x]) + {1: a, 3: (a + b) // 2, 4: nearest}[kind]) % 256
    return line


class TestPng:
    def test_colours_lie_where_the_values_are(self, tmp_path):
        curve = Curve("t", [0, 10], [0.0, 0.0], [(10, estimate(1.0, 0.9, 1.0))])
        image = pixels(save_curve(curve, tmp_path / "c.png")).astype(int)[:, :, :3]
        assert image.shape == (675, 1200, 3)
        blue = np.argwhere((image == (0x1F, 0x77, 0xB4)).all(axis=2))  # the mean, matplotlib's C0
        red = np.argwhere((image == (0xD6, 0x27, 0x28)).all(axis=2))  # held out, C3
        assert len(blue) > 500
        assert len(red) > 50
        line = np.bincount(blue[:, 0]).argmax()
        assert line > 500  # zero is low
        right = red[red[:, 1] > 1000]
        assert right[:, 0].min() < 120  # one is high, at the last step

    def test_the_same_curve_is_the_same_file(self, tmp_path):
        curve = Curve("t", [1, 2, 3], [0.1, 0.5, 0.9], [(3, estimate(0.9))])
        one, two = (save_curve(curve, tmp_path / name) for name in ("1.png", "2.png"))
        assert one.read_bytes() == two.read_bytes()
        other = save_curve(Curve("t", [1, 2, 3], [0.1, 0.5, 0.8]), tmp_path / "3.png")
        assert other.read_bytes() != one.read_bytes()

    def test_no_window_and_no_global_state(self, tmp_path):
        program = (
            "import sys\n"
            "from rolltree.reports import Curve, save_curve\n"
            "save_curve(Curve('t', [1], [0.5]), sys.argv[1])\n"
            "assert 'matplotlib.pyplot' not in sys.modules\n"
        )
        file = tmp_path / "c.png"
        subprocess.run([sys.executable, "-c", program, str(file)], check=True, timeout=60)
        assert file.stat().st_size > 0
