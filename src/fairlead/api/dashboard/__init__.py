"""The dashboard: a page of plain ES modules that a browser runs as they are, and the routes that serve them.

`server.js` calls the server and follows `GET /events`; `main.js` hands what comes to those who show it:
`totals.js` (with `timeline.js`, the last ten minutes, and `plot.js`), `fleet.js` and `chat.js`. Of languages,
and of how numbers are written, only `words.js` knows.

Three rules hold everywhere. What a server or a model says becomes text nodes, never HTML (`element.js`,
`markdown.js`), and the policy in `pages.py` has browsers enforce it. What has not changed is not touched, so
that nobody loses the focus and a screen reader keeps quiet. And event streams have one reader, `sse.js`, for
`/events` and for answers: an EventSource can neither send an API key nor show comments.
"""
