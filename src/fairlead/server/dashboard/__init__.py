"""The dashboard: a page of plain ES modules, without a build step, and the routes that serve them.

`server.js` calls the server and follows `GET /events`. `main.js` passes the data to the modules that show it:
`totals.js` (with `timeline.js`, the last ten minutes, and `plot.js`), `fleet.js` and `chat.js`. Languages and
number formats are in `words.js` only.

Three rules hold everywhere. Text of a server or a model becomes text nodes, never HTML (`element.js`,
`markdown.js`), and the policy in `pages.py` makes browsers enforce it. Elements that have not changed are not
touched, so that the focus stays and screen readers are silent. All event streams, `/events` and answers, are
read by `sse.js`: an EventSource can neither send an API key nor show comments.
"""
