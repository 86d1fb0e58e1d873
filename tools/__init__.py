"""Maintainer tools: checks of support, compatibility, and tests, and generated figures and pages of the documentation."""
