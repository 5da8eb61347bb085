//! Connections: addresses, dialing, HTTP, Unix sockets, and what the kernel says of the network.

pub mod address;
pub mod dial;
pub mod executor;
pub mod http_client;
pub(crate) mod netlink;
pub(crate) mod port;
pub(crate) mod request_path;
pub mod unix_socket;
pub(crate) mod unverified_tls;
