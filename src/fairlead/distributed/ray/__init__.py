"""Models on a Ray cluster: how many replicas each has, and their nodes.

Ray only places, starts and ends processes. Requests go to these over HTTP, as to any node.
"""
