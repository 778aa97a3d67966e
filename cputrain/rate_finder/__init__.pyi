from .curve import SMOOTHING as SMOOTHING
from .curve import RangeTest as RangeTest
from .curve import rate_at as rate_at
from .curve import suggest as suggest
from .picture import range_test_svg as range_test_svg
from .rank import range_test as range_test
