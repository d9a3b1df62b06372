"""Scoring: scenarios -> evaluate -> records -> tables and figures."""
