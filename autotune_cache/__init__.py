"""Winners shipped with kvgen (read-only); a user's own go to the user cache folder."""
