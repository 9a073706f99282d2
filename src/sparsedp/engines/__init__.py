"""Fast clipped sums behind the interface of dp/clipping.py, judged by its reference engine before they are used."""

from sparsedp.engines.choice import NAMES as NAMES
from sparsedp.engines.choice import Chosen as Chosen
from sparsedp.engines.choice import choose_engine as choose_engine
from sparsedp.engines.explanation import Explanation as Explanation
from sparsedp.engines.explanation import explain as explain
from sparsedp.engines.plan import Plan as Plan
from sparsedp.engines.self_check import self_check as self_check
