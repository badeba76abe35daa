"""The tests of mpiscale; its folders mirror the packages."""
