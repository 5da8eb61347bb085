//! The room over real sockets.
