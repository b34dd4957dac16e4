"""Many users, one device: requests wait in a bounded queue and share one running batch.

`jobs` is a request on its way, `rows` the running batch of images, `streams` text and masked text, `engine`
the thread that owns the device, `offer` what is served and within which limits, `web` and `page` what is
seen of it. Only `web` and `page` need the extra `demo`.
"""
