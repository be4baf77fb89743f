//! What an instance is between two calls, apart from its code: split off, stored, and made into an image again.
