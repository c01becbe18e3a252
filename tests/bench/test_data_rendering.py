from dataclasses import replace
from math import cos, hypot, pi, sin, sqrt, tan

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flatmtl_bench.data.rendering import flaws
from flatmtl_bench.data.rendering.camera import Camera
from flatmtl_bench.data.rendering.caster import NEAREST, Light, World, cast, render
from flatmtl_bench.data.rendering.draws import Draws
from flatmtl_bench.data.rendering.parts import Part, moved
from flatmtl_bench.data.rendering.rooms import room
from flatmtl_bench.data.rendering.streets import street
from flatmtl_bench.data.rendering.textures import PATTERNS, Texture

GREY = Texture((0.5, 0.5, 0.5))
HERE = Camera(eye=(0.0, 0.0, 0.0))
SIZE = 48


def part(shape, size, at, **options):
    return Part(shape, size, at, "objects", GREY, **options)


def seen(parts, camera=HERE, height=SIZE, width=SIZE):
    return render(World(parts), camera, height, width)


def rays(camera, height=SIZE, width=SIZE):
    """The direction of the ray through each pixel: it is 1 m long along the axis of the camera."""
    x = (np.arange(width) + 0.5 - width / 2) / (camera.focal * width)
    y = (height / 2 - np.arange(height) - 0.5) / (camera.focal * width)
    return np.stack([*np.meshgrid(x, y), -np.ones((height, width))])


def back_projected(view, camera):
    return np.where(view.part >= 0, view.depth, 0) * rays(camera, *view.depth.shape)


def random_parts(stream, count=12):
    """Boxes, balls and cylinders of all sizes and turns in front of the camera."""
    return [
        part(
            ("box", "ball", "cylinder")[i % 3],
            tuple(stream.uniform(0.1, 0.9, 3)),
            (stream.uniform(-2, 2), stream.uniform(2, 6), stream.uniform(-2, 2)),
            yaw=stream.uniform(0, 2 * pi),
            tilt=stream.uniform(0, 2 * pi),
        )
        for i in range(count)
    ]


def turned_back(one, points):
    """World points ``(..., 3)`` in units of a part along its own axes: its turns undone one after the other."""
    x, y, z = np.moveaxis(points - np.array(one.at), -1, 0)
    x, y = cos(one.yaw) * x + sin(one.yaw) * y, cos(one.yaw) * y - sin(one.yaw) * x
    y, z = cos(one.tilt) * y + sin(one.tilt) * z, cos(one.tilt) * z - sin(one.tilt) * y
    return np.stack([x, y, z], axis=-1) / np.array(one.size)


def outside(one, points):
    """How far points are out: below 1 inside a part, 1 on its surface."""
    x, y, z = np.abs(np.moveaxis(turned_back(one, points), -1, 0))
    return {
        "box": np.maximum(np.maximum(x, y), z),
        "ball": x**2 + y**2 + z**2,
        "cylinder": np.maximum(np.hypot(x, y), z),
    }[one.shape]


class TestShapes:
    """Depth and normal along known rays, in closed form."""

    def test_a_ball_is_met_where_the_quadratic_equation_says(self):
        centre, radius = np.array([0.3, -0.2, -4.0]), 1.2  # in camera coordinates: y of the world is -z
        view = seen([part("ball", (radius,) * 3, (0.3, 4.0, -0.2))])
        direction = rays(HERE)
        a, b = (direction**2).sum(0), np.tensordot(centre, direction, 1)
        root = b**2 - a * (centre @ centre - radius**2)
        hit = root > 1e-3
        expected = (b - np.sqrt(np.where(hit, root, 0))) / a
        np.testing.assert_allclose(view.depth[hit], expected[hit], rtol=1e-4)
        assert np.isinf(view.depth[root < -1e-3]).all()
        normal = (expected * direction - centre[:, None, None]) / radius
        np.testing.assert_allclose(view.normals[:, hit], normal[:, hit], atol=1e-3)

    def test_a_box_straight_ahead_is_a_rectangle_of_one_depth(self):
        view = seen([part("box", (1.0, 0.5, 0.7), (0.0, 4.0, 0.0))])
        x, y, _ = 3.5 * rays(HERE)
        inside = (np.abs(x) < 1.0) & (np.abs(y) < 0.7)
        np.testing.assert_array_equal(view.part == 0, inside)
        np.testing.assert_allclose(view.depth[inside], 3.5, rtol=1e-6)
        np.testing.assert_allclose(view.normals[:, inside].T, np.tile([0, 0, 1], (inside.sum(), 1)), atol=1e-6)

    def test_a_box_on_its_edge_shows_two_faces(self):
        view = seen([part("box", (1.0, 1.0, 1.0), (0.0, 4.0, 0.0), yaw=pi / 4)])
        middle = view.depth[SIZE // 2]
        x = rays(HERE)[0, 0]
        near = np.abs(x) < 0.2
        np.testing.assert_allclose(middle[near], (4 - sqrt(2)) / (1 - np.abs(x[near])), rtol=1e-5)
        left, right = view.normals[:, SIZE // 2, SIZE // 2 - 2], view.normals[:, SIZE // 2, SIZE // 2 + 2]
        np.testing.assert_allclose([left, right], [[-sqrt(0.5), 0, sqrt(0.5)], [sqrt(0.5), 0, sqrt(0.5)]], atol=1e-5)

    def test_an_upright_cylinder_is_a_circle_from_above_and_has_level_normals(self):
        view = seen([part("cylinder", (0.8, 0.8, 0.6), (0.0, 4.0, 0.0))])
        x = rays(HERE)[0]
        a, root = x**2 + 1, 16 - (x**2 + 1) * (16 - 0.64)
        expected = (4 - np.sqrt(np.maximum(root, 0))) / a
        on_side = (root > 1e-2) & (np.abs(expected * rays(HERE)[1]) < 0.58)
        np.testing.assert_allclose(view.depth[on_side], expected[on_side], rtol=1e-4)
        normal = np.stack([expected * x, 0 * x, 4 - expected]) / 0.8
        np.testing.assert_allclose(view.normals[:, on_side], normal[:, on_side], atol=2e-3)

    def test_a_cylinder_shows_its_cap_from_above(self):
        view = seen([part("cylinder", (0.8, 0.8, 0.6), (0.0, 0.0, -3.0))], Camera((0.0, 0.0, 0.0), pitch=-pi / 2))
        x, y, _ = 2.4 * rays(HERE)
        inside = np.hypot(x, y) < 0.8
        np.testing.assert_array_equal(view.part == 0, inside)
        np.testing.assert_allclose(view.depth[inside], 2.4, rtol=1e-5)
        np.testing.assert_allclose(view.normals[2, inside], 1, atol=1e-5)

    @pytest.mark.parametrize("pitch", [0.0, -0.3, -1.2])
    def test_the_floor_lies_at_the_height_of_the_eye(self, pitch):
        camera = Camera((0.5, -2.0, 1.6), yaw=0.4, pitch=pitch, focal=0.7)
        view = seen([part("plane", (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))], camera)
        fall = sin(-pitch) - cos(pitch) * rays(camera)[1]  # metres down, for each along the axis
        np.testing.assert_array_equal(view.part == 0, fall > 0)
        np.testing.assert_allclose(view.depth[fall > 1e-3], 1.6 / fall[fall > 1e-3], rtol=1e-3)
        up = np.array([0, cos(pitch), sin(-pitch)])
        np.testing.assert_allclose(view.normals[:, fall > 0].T, np.tile(up, ((fall > 0).sum(), 1)), atol=1e-6)

    def test_a_plane_is_not_seen_from_behind(self):
        assert (seen([part("plane", (1.0, 1.0, 1.0), (0.0, 3.0, 0.0), tilt=-pi / 2)]).part == -1).all()

    def test_what_is_behind_the_camera_or_around_it_is_not_seen(self):
        behind, around = part("ball", (1.0,) * 3, (0.0, -3.0, 0.0)), part("box", (1.0,) * 3, (0.0, 0.0, 0.0))
        assert (seen([behind, around]).part == -1).all()


class TestCaster:
    @given(st.integers(0, 2**31))
    @settings(max_examples=15)
    def test_each_ray_ends_on_the_first_surface_in_its_way(self, seed):
        stream = np.random.RandomState(seed)
        camera = Camera((0.0, -1.0, 0.0), stream.uniform(-0.3, 0.3), stream.uniform(-0.3, 0.3), 0.2, 0.8)
        parts = random_parts(stream)
        hits = cast(World(parts), camera, SIZE, SIZE)
        pixels = stream.randint(0, SIZE, (60, 2))
        for row, column in pixels:
            depth, number = hits.depth[row, column], hits.part[row, column]
            direction = camera.axes.T @ rays(camera)[:, row, column]
            end = min(depth, 12.0)
            before = np.array(camera.eye) + np.linspace(NEAREST, end - 1e-3, 400)[:, None] * direction
            for other in parts:
                assert outside(other, before).min() > 0.995
            if number >= 0:
                assert outside(parts[number], np.array(camera.eye) + depth * direction) == pytest.approx(1, abs=1e-3)

    @given(st.floats(-pi, pi), st.floats(-1.5, 1.5), st.floats(-pi, pi))
    def test_the_axes_of_a_camera_are_a_right_handed_frame_that_looks_ahead(self, yaw, pitch, roll):
        axes = Camera((1.0, 2.0, 3.0), yaw, pitch, roll).axes
        np.testing.assert_allclose(axes @ axes.T, np.eye(3), atol=1e-12)
        assert np.linalg.det(axes) == pytest.approx(1)
        np.testing.assert_allclose(-axes[2], [-sin(yaw) * cos(pitch), cos(yaw) * cos(pitch), sin(pitch)], atol=1e-12)

    @pytest.mark.parametrize("make", [room, street])
    def test_normals_are_those_of_the_surface_that_the_depth_describes(self, make):
        for index in range(3):
            world, camera = make(Draws(3, index))
            view = render(world, camera, 96, 128)
            points = back_projected(view, camera)
            across, down = points[:, 1:-1, 2:] - points[:, 1:-1, :-2], points[:, :-2, 1:-1] - points[:, 2:, 1:-1]
            normal = np.cross(across, down, axis=0)
            normal /= np.maximum(np.linalg.norm(normal, axis=0), 1e-12)
            truth, part = view.normals[:, 1:-1, 1:-1], view.part
            flat = np.ones(truth.shape[1:], bool)
            for dy, dx in ((0, 1), (2, 1), (1, 0), (1, 2)):
                window = (slice(dy, dy + 94), slice(dx, dx + 126))
                flat &= (part[window] == part[1:-1, 1:-1]) & (
                    (view.normals[(slice(None), *window)] * truth).sum(0) > 0.9999
                )
            flat &= part[1:-1, 1:-1] >= 0
            assert flat.mean() > 0.15  # many parts are small
            assert ((normal * truth).sum(0)[flat] > 0.995).mean() > 0.999

    @pytest.mark.parametrize("make", [room, street])
    def test_normals_have_unit_length_and_face_the_camera(self, make):
        world, camera = make(Draws(4))
        view = render(world, camera, 64, 96)
        there = view.part >= 0
        np.testing.assert_allclose(np.linalg.norm(view.normals, axis=0)[there], 1, atol=1e-5)
        assert ((view.normals * rays(camera, 64, 96)).sum(0)[there] < 1e-4).all()
        assert (view.normals[:, ~there] == 0).all()

    @pytest.mark.parametrize("make", [room, street])
    def test_the_mirrored_world_gives_the_mirrored_picture(self, make):
        world, camera = make(Draws(5))

        def mirror(x, y, z):
            return -x, y, z

        parts = [one._replace(at=mirror(*one.at), yaw=-one.yaw) for one in world.parts]
        other = replace(camera, eye=mirror(*camera.eye), yaw=-camera.yaw, roll=-camera.roll)
        view, mirrored = render(world, camera, 64, 96), render(World(parts), other, 64, 96)
        same = view.part == mirrored.part[:, ::-1]
        assert same.mean() > 0.999  # what lies exactly between two pixels falls to either
        np.testing.assert_allclose(view.depth[same], mirrored.depth[:, ::-1][same], rtol=1e-4)
        flipped = mirrored.normals[:, :, ::-1] * np.array([-1, 1, 1])[:, None, None]
        assert (np.abs(view.normals - flipped).max(0)[same] < 1e-3).mean() > 0.999

    def test_a_part_is_as_far_as_it_was_moved(self):
        stone = part("ball", (0.5,) * 3, (1.0, 0.0, 0.0))
        (there,) = moved([stone], 0.0, 4.0, 0.0, yaw=pi / 2)
        assert there.at == pytest.approx((0.0, 5.0, 0.0))
        assert seen([there], height=3, width=3).depth[1, 1] == pytest.approx(4.5)

    def test_a_larger_picture_shows_the_same(self):
        world, camera = room(Draws(6))
        small, large = render(world, camera, 32, 64), render(world, camera, 96, 192)  # whose pixels have common centres
        np.testing.assert_allclose(small.depth, large.depth[1::3, 1::3], rtol=1e-4)
        assert (small.part == large.part[1::3, 1::3]).mean() > 0.999


class TestLight:
    lamp = Light(Camera((0.0, 4.0, 3.0), pitch=-pi / 2, focal=0.3), (1.0, 1.0, 1.0))
    floor = part("plane", (1.0, 1.0, 1.0), (0.0, 0.0, 0.0), shadow=False)
    camera = Camera((0.0, 0.0, 2.0), pitch=-0.5, focal=0.8)

    def picture(self, parts, **options):
        world = World(parts, [replace(self.lamp, **options)], ambient=(0.0, 0.0, 0.0))
        return render(world, self.camera, 96, 96)

    def floor_points(self, view):
        """Floor points in the world, ``(96, 96, 3)``."""
        points = np.einsum("ij,jhw->hwi", self.camera.axes.T, back_projected(view, self.camera))
        return points + np.array(self.camera.eye)

    def test_a_surface_is_as_bright_as_it_faces_the_lamp(self):
        view = self.picture([self.floor])
        lit = view.part == 0
        way = np.array(self.lamp.view.eye) - self.floor_points(view)
        expected = 0.5 * way[..., 2] / np.linalg.norm(way, axis=-1)
        np.testing.assert_allclose(view.picture[0][lit], expected[lit], rtol=1e-3, atol=1e-4)

    def test_reach_is_where_the_light_is_half_as_bright(self):
        near, far = self.picture([self.floor]), self.picture([self.floor], reach=3.0)
        below = np.linalg.norm(self.floor_points(near)[..., :2] - [0.0, 4.0], axis=-1)
        row, column = np.unravel_index(np.nanargmin(np.where(near.part == 0, below, np.nan)), below.shape)
        assert far.picture[0, row, column] / near.picture[0, row, column] == pytest.approx(0.5, rel=0.01)

    def test_a_ball_throws_the_shadow_of_a_cone(self):
        ball = part("ball", (0.5,) * 3, (0.3, 4.2, 1.2))
        view = self.picture([self.floor, ball])
        points, lamp = self.floor_points(view), np.array(self.lamp.view.eye)
        way = (points - lamp) / np.linalg.norm(points - lamp, axis=-1, keepdims=True)
        aside = np.linalg.norm(np.cross(way, np.array(ball.at) - lamp), axis=-1)
        floor = view.part == 0
        assert (view.picture[0][floor & (aside < 0.42)] == 0).all()
        assert (view.picture[0][floor & (aside > 0.58) & (np.abs(points[..., 0]) < 4)] > 0).all()
        assert (floor & (aside < 0.42)).sum() > 100
        without = self.picture([self.floor, ball], shadows=False)
        assert (without.picture[0][floor] > 0).all()

    def test_what_glows_needs_no_light(self):
        screen = part("box", (1.0, 0.1, 1.0), (0.0, 4.0, 1.0))._replace(texture=Texture((0.2, 0.6, 1.0), glow=1.0))
        view = render(World([screen], ambient=(0.0, 0.0, 0.0)), self.camera, 32, 32)
        np.testing.assert_allclose(
            view.picture[:, view.part == 0].T, [[0.2, 0.6, 1.0]] * (view.part == 0).sum(), atol=1e-6
        )


class TestTextures:
    @pytest.mark.parametrize("pattern", PATTERNS)
    def test_patterns_mix_the_two_colours(self, pattern):
        at = np.random.RandomState(0).uniform(-20, 20, (3, 5000)).astype(np.float32)
        share = PATTERNS[pattern](at)
        assert share.shape in ((1, 5000), (3, 5000))
        assert share.min() >= 0
        assert share.max() <= 1
        assert pattern == "plain" or share.std() > 0.1

    @pytest.mark.parametrize("pattern", ["stripes", "checks", "tiles", "mosaic", "panes"])
    def test_a_pattern_repeats_or_changes_from_cell_to_cell(self, pattern):
        at = np.random.RandomState(1).uniform(0.01, 0.24, (3, 200)) + np.array([[4.0], [7.0], [-3.0]])
        moved = PATTERNS[pattern](at + np.array([[1.0], [0.0], [0.0]]))
        assert np.array_equal(PATTERNS[pattern](at), moved) == (pattern != "mosaic")


class TestFlaws:
    @given(st.integers(0, 2**31), st.floats(0, 0.9))
    def test_blobs_cover_their_share(self, seed, share):
        assert flaws.blobs(Draws(seed), 40, 60, share).sum() == int(share * 40 * 60)

    def test_blobs_are_patches(self):
        mask = flaws.blobs(Draws(0), 64, 64, 0.2)
        assert (mask[1:] != mask[:-1]).mean() < 0.1

    @given(st.integers(1, 3), st.integers(0, 2**31))
    def test_borders_are_where_the_label_changes(self, width, seed):
        labels = np.kron(np.random.RandomState(seed).randint(0, 3, (3, 3)), np.ones((5, 5), int))
        found = flaws.borders(labels, width)
        for row in range(15):
            for column in range(15):
                ahead = [*labels[row, column : column + width + 1], *labels[row : row + width + 1, column]]
                assert found[row, column] == (len({*ahead}) > 1)

    def test_surfaces_are_grazed_at_small_angles_only(self):
        camera = Camera((0.0, 0.0, 1.0), focal=0.5)
        view = seen([part("plane", (1.0, 1.0, 1.0), (0.0, 0.0, 0.0))], camera, 200, 200)
        down = -rays(camera, 200, 200)[1]
        cosine = down / np.linalg.norm(rays(camera, 200, 200), axis=0)
        floor = view.part == 0
        np.testing.assert_array_equal(flaws.grazed(camera, view.normals, 0.2)[floor], cosine[floor] < 0.2)

    def test_a_photograph_has_eight_bits_and_a_middle_brightness(self):
        picture = np.random.RandomState(0).uniform(0, 0.2, (3, 50, 50)).astype(np.float32)
        photo = flaws.photograph(Draws(0), picture)
        assert photo.dtype == np.uint8
        assert 0.3 * 255 < photo.mean() < 0.6 * 255


class TestWorlds:
    def test_rooms_are_closed(self):
        for index in range(20):
            world, camera = room(Draws(8, index))
            view = render(world, camera, 32, 48)
            assert (view.part >= 0).all()
            assert view.depth.max() < hypot(5, 6, 3)

    def test_furniture_stands_on_the_floor_and_within_the_walls(self):
        for index in range(20):
            world, _ = room(Draws(9, index))
            width, length, height = (max(one.at[axis] for one in world.parts[:6]) for axis in range(3))
            for one in world.parts:
                if one.shape != "plane" and one.label not in ("wall", "floor", "window"):
                    x, y, z = one.at
                    assert -0.1 < x < width + 0.1
                    assert -0.1 < y < length + 0.1
                    assert -0.01 < z < height

    def test_the_camera_of_a_street_looks_along_it(self):
        for index in range(20):
            world, camera = street(Draws(10, index))
            view = render(world, camera, 32, 64)
            road = [i for i, one in enumerate(world.parts) if one.label == "flat"]
            assert np.isin(view.part[20:26, 20:44], road).mean() > 0.2 or view.depth[16, 32] < 12

    def test_half_the_angle_of_view_is_the_inverse_tangent_of_half_over_focal(self):
        x, y = Camera((0.0, 0.0, 0.0), focal=0.5 / tan(0.6)).rays(100, 200)
        edge = x[-1] + (x[1] - x[0]) / 2
        assert np.arctan(edge) == pytest.approx(0.6)
        assert y[0] == pytest.approx(-y[-1])
        assert y[0] > 0
