"""The embedded world: scenes whose captions, detector and judge are exactly right."""
