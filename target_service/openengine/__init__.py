"""OpenEngine's services (openengine.v1, revision 1) on a target: its messages to those of TargetService, and back.

Requests pass the same admission as those of TargetService, so that every limit holds for both together.
"""
