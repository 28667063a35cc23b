"""Everything is in setup.cfg; this file lets the setuptools of Python 3.7 find it."""

from setuptools import setup

setup()
