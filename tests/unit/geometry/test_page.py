import pytest

from kvferry.common.errors import GeometryError
from kvferry.geometry import Axis, Field, PageFormat, opaque_page


def test_an_axis_cut_in_two_counts_both_loops():
    axis = Axis("token", ((2, 4096), (16, 4)))
    assert (axis.count, axis.total, axis.stop) == (32, 32, 32)
    assert axis.offsets()[[15, 16, 31]].tolist() == [60, 4096, 4156]


@pytest.mark.parametrize(
    ("loops", "start", "total"),
    [((), 0, 0), (((0, 4),), 0, 0), (((4, 1),), 6, 8), (((4, 1),), -1, 8)],
    ids=["no loops", "no elements", "past the total", "before the start"],
)
def test_an_axis_that_cannot_be_is_refused(loops, start, total):
    with pytest.raises(GeometryError, match="axis 'head'"):
        Axis("head", loops, start, total)


def test_an_axis_longer_than_any_engines_is_refused_before_memory_is_taken_for_it():
    longest = Axis("token", ((1024, 1 << 14), (1024, 16)))
    assert longest.count == 1 << 20
    with pytest.raises(GeometryError, match="axis 'token': 4294967296 elements, at most 1048576 are planned"):
        Axis("token", ((1 << 32, 2),))


def test_a_field_is_sharded_along_one_axis_at_most():
    a, b = (Axis(name, ((2, 2),), 0, 4) for name in "ab")
    with pytest.raises(GeometryError, match=r"\['a', 'b'\] are sharded"):
        Field("kv", 2, 0, (a, b))


def test_two_axes_of_a_field_have_different_names():
    with pytest.raises(GeometryError, match="must differ"):
        Field("kv", 2, 0, (Axis("a", ((2, 2),)), Axis("a", ((2, 4),))))


def test_a_field_reaches_as_far_as_its_last_element_in_either_direction():
    field = Field("kv", 2, 100, (Axis("a", ((3, -10),)), Axis("b", ((2, 4),))))
    assert field.extent() == (80, 106)


def test_a_field_says_which_part_of_a_sharded_axis_it_holds():
    whole = Axis("content", ((8, 2),))
    assert Field("kv", 2, 0, (Axis("head", ((2, 16),), 4, 8), whole)).held == (("head", 4, 6),)
    assert Field("kv", 2, 0, (whole,)).held == ()


def test_a_field_that_leaves_its_page_is_refused():
    with pytest.raises(GeometryError, match=r"reaches bytes \[8, 16\) of a page of 15"):
        PageFormat("kv", 0, 15, (Field("ssm", 8, 8, ()),))


def test_elements_of_a_field_divide_the_tokens_of_its_block():
    def page(elements: int) -> PageFormat:
        return PageFormat("kv", 16, 64, (Field("k", 2, 0, (Axis("token", ((elements, 2),)),)),))

    assert [page(n).element_tokens(page(n).fields[0]) for n in (16, 8, 1)] == [1, 2, 16]
    with pytest.raises(GeometryError, match="'k' has 7 elements along its tokens; expected a divisor of the"):
        page(7)
    with pytest.raises(GeometryError, match="'k' has 32 elements"):
        page(32)


def test_two_fields_of_a_page_have_different_names():
    k, again = (Field("k", 2, at, (Axis("token", ((4, 2),)),)) for at in (0, 8))
    with pytest.raises(GeometryError, match=r"field names \['k', 'k'\] must differ"):
        PageFormat("kv", 4, 16, (k, again))


def test_a_page_without_fields_is_refused():
    with pytest.raises(GeometryError, match="no fields"):
        PageFormat("kv", 16, 64, ())


def test_an_opaque_page_is_one_element_of_one_shard():
    (field,) = opaque_page("riddle", 16, 4096, 1, 4).fields
    assert (field.item_bytes, field.elements, field.held) == (4096, 1, (("shard", 1, 2),))
