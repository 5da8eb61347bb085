//! Sends requests to the kernel over netlink.
//!
//! [`request`] sends a message and returns the kernel's replies. [`nft_chains`] and [`tcp_socket_owner`] are
//! ready-made requests. Numbers are defined in `linux/netlink.h`, `linux/netfilter` and `linux/inet_diag.h`.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
    socket_with,
};

/// Time limit of each reply. The kernel usually replies at once.
const LIMIT: Duration = Duration::from_secs(5);
/// Maximum size of all replies to a request, in bytes.
const MAX_REPLIES: usize = 16 << 20;

const REQUEST_AND_ACK: u16 = 0x5;
/// Flag of a request that lists all objects.
pub(crate) const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// Encodes an attribute with a value of at most 65,531 bytes.
pub(crate) fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
    let mut bytes = [length.to_ne_bytes(), kind.to_ne_bytes()].concat();
    bytes.extend(value);
    bytes.resize(bytes.len().next_multiple_of(4), 0);
    bytes
}

/// Lists the chains of nftables: the number of the family, the name of the table and the name of the chain.
pub(crate) fn nft_chains() -> io::Result<Vec<(u8, String, String)>> {
    const GET_CHAIN: u16 = 10 << 8 | 4;
    let replies = request(Some(netlink::NETFILTER), GET_CHAIN, DUMP, &[0; 4])?;
    Ok(replies.iter().filter_map(|reply| nft_chain(reply)).collect())
}

fn nft_chain(reply: &[u8]) -> Option<(u8, String, String)> {
    let (header, attributes) = reply.split_at_checked(4)?;
    let [table, name] = [1, 3].map(|kind| {
        let (_, name) = parts(attributes).find(|(found, _)| *found == kind)?;
        Some(String::from_utf8_lossy(name.strip_suffix(b"\0").unwrap_or(name)).into_owned())
    });
    Some((header[0], table?, name?))
}

/// Returns the user whose process holds one end of a TCP connection in this network namespace, and the inode
/// of its socket. Fails for an end that its process has closed.
pub(crate) fn tcp_socket_owner(end: SocketAddr, other: SocketAddr) -> io::Result<(u32, u32)> {
    const BY_FAMILY: u16 = 20;
    const TCP: u8 = 6;
    let ends = [end, other].map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
    let family = if ends[0].is_ipv4() { 2 } else { 10 };
    let mut body = vec![family, TCP, 0, 0];
    // Sockets in any state match.
    body.extend([0xff; 4]);
    body.extend(ports_and_addresses(ends));
    // Any interface and any cookie match.
    body.extend([0; 4]);
    body.extend([0xff; 8]);
    let replies = request(Some(netlink::SOCK_DIAG), BY_FAMILY, 0, &body)?;
    replies
        .iter()
        .find_map(|reply| owner_of(ends, reply))
        .ok_or_else(|| io::Error::other("its process has closed the connection"))
}

fn ports_and_addresses(ends: [SocketAddr; 2]) -> Vec<u8> {
    let mut bytes = ends.map(|end| end.port().to_be_bytes()).concat();
    for end in ends {
        match end.ip() {
            IpAddr::V4(v4) => bytes.extend([v4.octets(), [0; 4], [0; 4], [0; 4]].as_flattened()),
            IpAddr::V6(v6) => bytes.extend(v6.octets()),
        }
    }
    bytes
}

/// Returns user and inode, if the reply is about this connection, not a listener, and its socket belongs to a
/// process. The kernel reports user 0 for a socket that is closed.
fn owner_of(ends: [SocketAddr; 2], reply: &[u8]) -> Option<(u32, u32)> {
    /// Established, and the states after one side has shut down sending.
    const OPEN: [u8; 4] = [1, 4, 5, 8];
    let found = reply.get(4..40)?;
    // An IPv6 socket may have IPv4 addresses.
    let mapped = ends.map(|end| match end.ip() {
        IpAddr::V4(address) => (address.to_ipv6_mapped(), end.port()).into(),
        IpAddr::V6(_) => end,
    });
    let is_same = found == ports_and_addresses(ends) || found == ports_and_addresses(mapped);
    let user = number(reply, 64)?;
    let inode = number(reply, 68)?;
    (is_same && OPEN.contains(&reply[1]) && inode != 0).then_some((user, inode))
}

fn number(reply: &[u8], offset: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(*reply.get(offset..)?.first_chunk()?))
}

/// Iterates over kinds and values of attributes, up to one that is truncated.
pub(crate) fn parts(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

/// Sends a request, and waits until it is done. Returns the replies, without netlink's headers. The protocol
/// None is NETLINK_ROUTE, whose number is 0. `body` is the header of the protocol, whose length is a multiple of
/// 4, and attributes.
pub(crate) fn request(
    protocol: Option<Protocol>,
    kind: u16,
    flags: u16,
    body: &[u8],
) -> io::Result<Vec<Vec<u8>>> {
    let socket =
        socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, protocol)?;
    set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT))?;
    let sequence = fastrand::u32(..).to_ne_bytes();
    send(&socket, &message(kind, flags, sequence, body), SendFlags::empty())?;
    let mut replies = Vec::new();
    let mut total = 0;
    let mut buffer = vec![0; 32 << 10];
    while total < MAX_REPLIES {
        let (length, _) = recv(&socket, buffer.as_mut_slice(), RecvFlags::empty())?;
        total += length;
        let mut rest = &buffer[..length];
        while !rest.is_empty() {
            let (kind, [replied, payload, after]) =
                split(rest).ok_or_else(|| io::Error::other("the kernel's answer is truncated"))?;
            rest = after;
            match kind {
                // Another process may send to this socket.
                _ if *replied != sequence => {}
                ERROR | DONE => return outcome(payload).map(|()| replies),
                _ => replies.push(payload.to_vec()),
            }
        }
    }
    Err(io::Error::other("the kernel's answer does not end"))
}

/// Encodes a message. The kernel fills in the port of the socket, so it is 0.
fn message(kind: u16, flags: u16, sequence: [u8; 4], body: &[u8]) -> Vec<u8> {
    // All messages are shorter than a page.
    let length = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((flags | REQUEST_AND_ACK).to_ne_bytes());
    message.extend(sequence);
    message.extend([0; 4]);
    message.extend(body);
    message
}

/// Splits off the first message: its kind, sequence number and payload, and the messages behind it.
fn split(bytes: &[u8]) -> Option<(u16, [&[u8]; 3])> {
    let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
    let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
    let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
    Some((kind, [bytes.get(8..12)?, bytes.get(16..length)?, rest]))
}

/// Reads the last reply to a request, a negative errno or 0 for success.
fn outcome(payload: &[u8]) -> io::Result<()> {
    let number = payload.first_chunk().copied().map_or(0, i32::from_ne_bytes);
    let error = io::Error::from_raw_os_error(number.saturating_neg());
    match error.kind() {
        _ if number >= 0 => Ok(()),
        kind @ io::ErrorKind::PermissionDenied => {
            Err(io::Error::new(kind, "this container lacks the capability NET_ADMIN"))
        }
        _ => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_and_attributes_are_read_as_they_are_written() {
        let attributes = [attribute(1, b"nat\0"), attribute(2, b"x"), attribute(3, b"")];
        let body = [&[2, 0, 0, 0][..], &attributes.concat()].concat();
        let mut bytes = message(32, DUMP, [1, 2, 3, 4], &body);
        bytes.push(7);
        let (kind, [sequence, payload, rest]) = split(&bytes).expect("a message");
        assert_eq!((kind, sequence, rest), (32, &[1, 2, 3, 4][..], &[7][..]));
        let parts: Vec<_> = parts(&payload[4..]).collect();
        assert_eq!(parts, [(1, &b"nat\0"[..]), (2, b"x"), (3, b"")]);
    }

    #[test]
    fn a_netlink_error_number_becomes_an_io_error() {
        let kind = |number: i32| outcome(&number.to_ne_bytes()).map_err(|error| error.kind());
        assert_eq!(kind(0), Ok(()));
        assert_eq!(kind(-17), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(kind(-1), Err(io::ErrorKind::PermissionDenied));
        assert!(kind(i32::MIN).is_err());
        assert!(outcome(&[]).is_ok());
    }

    /// Encodes a reply about a socket of this family and state, with these ends, which belongs to user 7.
    fn reply(family: u8, state: u8, ends: [&str; 2], inode: u32) -> Vec<u8> {
        let ends = ends.map(|end| end.parse().expect("an end"));
        let mut bytes = vec![family, state, 0, 0];
        bytes.extend(ports_and_addresses(ends));
        bytes.resize(64, 0);
        bytes.extend(7_u32.to_ne_bytes());
        bytes.extend(inode.to_ne_bytes());
        bytes
    }

    #[test]
    fn the_user_is_read_only_while_a_process_holds_the_exact_connection() {
        const LISTEN: u8 = 10;
        let (v4, mapped, v6) = (
            ["127.0.0.1:5", "127.0.0.1:15020"],
            ["[::ffff:127.0.0.1]:5", "[::ffff:127.0.0.1]:15020"],
            ["[::1]:5", "[::1]:15020"],
        );
        for (asked, reply, expected) in [
            (v4, reply(2, 1, v4, 9), Some(7)),
            (v4, reply(10, 1, mapped, 9), Some(7)),
            (v6, reply(10, 4, v6, 9), Some(7)),
            (v4, reply(2, 5, v4, 9), Some(7)),
            (v4, reply(2, 1, v4, 0), None),
            (v4, reply(2, LISTEN, v4, 9), None),
            (v4, reply(2, 1, ["127.0.0.1:6", v4[1]], 9), None),
            (v4, reply(2, 1, [v4[1], v4[0]], 9), None),
            (v6, reply(2, 1, v4, 9), None),
            (v4, reply(2, 1, v4, 9)[..71].to_vec(), None),
            (v4, Vec::new(), None),
        ] {
            let ends = asked.map(|end| end.parse().expect("an end"));
            assert_eq!(
                owner_of(ends, &reply).map(|owner| owner.0),
                expected,
                "{asked:?} {reply:?}"
            );
        }
    }

    proptest! {
        #[test]
        fn a_reply_of_any_bytes_has_a_user_or_none(bytes: Vec<u8>, cut in 0..80_usize) {
            let ends = ["127.0.0.1:5", "127.0.0.1:15020"];
            let mut reply = reply(2, 1, ends, 9);
            let length = cut.min(reply.len()).min(bytes.len());
            reply[..length].copy_from_slice(&bytes[..length]);
            let ends = ends.map(|end| end.parse().expect("an end"));
            prop_assert!(owner_of(ends, &reply).is_none_or(|owner| length > 64 || owner.0 == 7));
            let _ = owner_of(ends, &bytes);
        }

        #[test]
        fn bytes_of_any_kind_are_split_or_cut(bytes: Vec<u8>) {
            let mut rest = &bytes[..];
            while let Some((_, [_, _, after])) = split(rest) {
                prop_assert!(after.len() < rest.len());
                rest = after;
            }
            prop_assert!(parts(&bytes).count() <= bytes.len());
        }
    }
}
