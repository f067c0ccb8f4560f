"""A page as a test reads it."""

import base64
import gzip
import re

_PACKED = re.compile(r'<script type="text/plain">([^<]*)</script>')


def readable(page: str) -> str:
    """The page less plotly.js, with its figures' data as JSON."""
    head, _, rest = page.partition('<script type="text/plain" id="plotly">')
    page = head + rest.partition("</script>")[2]
    return _PACKED.sub(lambda packed: gzip.decompress(base64.b64decode(packed[1])).decode(), page)
