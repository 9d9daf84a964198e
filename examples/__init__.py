"""Small engines that use kvferry's connector. They run from a checkout and are not part of any wheel."""
