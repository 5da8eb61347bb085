//! Asks the kernel over netlink. Numbers are those of `linux/netlink.h` and `linux/netfilter`.

use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
    socket_with,
};

/// The kernel answers at once.
const LIMIT: Duration = Duration::from_secs(5);
/// Of an answer, in bytes.
const LARGEST_ANSWER: usize = 1 << 20;

const REQUEST_AND_ACK: u16 = 0x5;
/// Flag of a request for all.
pub(crate) const DUMP: u16 = 0x300;
const ERROR: u16 = 2;
const DONE: u16 = 3;

/// A request.
#[derive(Clone, Debug)]
pub(crate) struct Message(Vec<u8>);

impl Message {
    /// `header` is that of the protocol; its length is a multiple of 4.
    pub(crate) fn new(kind: u16, flags: u16, header: &[u8]) -> Self {
        let mut bytes = vec![0; 4];
        bytes.extend(kind.to_ne_bytes());
        bytes.extend((flags | REQUEST_AND_ACK).to_ne_bytes());
        // Sequence and port: one request at a time, and the kernel knows the socket.
        bytes.extend([0; 8]);
        bytes.extend(header);
        Self(bytes)
    }

    /// Adds an attribute of at most 65,531 bytes.
    pub(crate) fn attribute(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(4 + value.len()).unwrap_or(u16::MAX);
        self.0.extend(length.to_ne_bytes());
        self.0.extend(kind.to_ne_bytes());
        self.0.extend(value);
        self.0.resize(self.0.len().next_multiple_of(4), 0);
        self
    }
}

/// Names of the tables of nftables, with the number of their family.
pub(crate) fn nft_tables() -> io::Result<Vec<(u8, String)>> {
    const GET_TABLE: u16 = 10 << 8 | 1;
    const NAME: u16 = 1;
    let any_family = [0; 4];
    let replies =
        Socket::open(Some(netlink::NETFILTER))?.ask(Message::new(GET_TABLE, DUMP, &any_family))?;
    let table = |reply: &Vec<u8>| {
        let (header, attributes) = reply.split_at_checked(4)?;
        let name = parts(attributes).find(|(kind, _)| *kind == NAME)?.1;
        let name = name.strip_suffix(b"\0").unwrap_or(name);
        Some((header[0], String::from_utf8_lossy(name).into_owned()))
    };
    Ok(replies.iter().filter_map(table).collect())
}

/// Kinds and values of attributes, up to one that is cut.
pub(crate) fn parts(mut bytes: &[u8]) -> impl Iterator<Item = (u16, &[u8])> {
    std::iter::from_fn(move || {
        let length = usize::from(u16::from_ne_bytes(*bytes.first_chunk()?));
        let kind = u16::from_ne_bytes(*bytes.get(2..)?.first_chunk()?);
        let value = bytes.get(4..length)?;
        bytes = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, value))
    })
}

#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// None is NETLINK_ROUTE, whose number is 0.
    pub(crate) fn open(protocol: Option<Protocol>) -> io::Result<Self> {
        let (family, flags) = (AddressFamily::NETLINK, SocketFlags::CLOEXEC);
        let socket = socket_with(family, SocketType::RAW, flags, protocol)?;
        set_socket_timeout(&socket, Timeout::Recv, Some(LIMIT))?;
        Ok(Self(socket))
    }

    /// Sends a request, and waits until it is done. Returns what was answered, without netlink's headers.
    pub(crate) fn ask(&self, Message(mut request): Message) -> io::Result<Vec<Vec<u8>>> {
        let length = u32::try_from(request.len()).map_err(io::Error::other)?;
        request[..4].copy_from_slice(&length.to_ne_bytes());
        send(&self.0, &request, SendFlags::empty())?;
        let (mut replies, mut total) = (Vec::new(), 0);
        let mut buffer = vec![0; 32 << 10];
        while total < LARGEST_ANSWER {
            let (length, _) = recv(&self.0, buffer.as_mut_slice(), RecvFlags::empty())?;
            total += length;
            let mut rest = &buffer[..length];
            while !rest.is_empty() {
                let (kind, payload, after) = split(rest)?;
                rest = after;
                match kind {
                    ERROR | DONE => return outcome(payload).map(|()| replies),
                    _ => replies.push(payload.to_vec()),
                }
            }
        }
        Err(io::Error::other("the kernel's answer does not end"))
    }
}

/// The first message's kind and payload, and the messages behind it.
fn split(bytes: &[u8]) -> io::Result<(u16, &[u8], &[u8])> {
    let message = || {
        let length = u32::from_ne_bytes(*bytes.first_chunk()?) as usize;
        let kind = u16::from_ne_bytes(*bytes.get(4..)?.first_chunk()?);
        let rest = bytes.get(length.next_multiple_of(4)..).unwrap_or_default();
        Some((kind, bytes.get(16..length)?, rest))
    };
    message().ok_or_else(|| io::Error::other("the kernel's answer is cut"))
}

/// The number that a request ends with; 0 is success.
fn outcome(payload: &[u8]) -> io::Result<()> {
    let number = payload
        .first_chunk()
        .map_or(0, |code| i32::from_ne_bytes(*code));
    let error = io::Error::from_raw_os_error(number.saturating_neg());
    match error.kind() {
        _ if number >= 0 => Ok(()),
        kind @ io::ErrorKind::PermissionDenied => {
            let text = "it takes the capability NET_ADMIN, which is missing";
            Err(io::Error::new(kind, text))
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
        let message = Message::new(32, DUMP, &[2, 0, 0, 0]);
        let message = message.attribute(1, b"nat\0").attribute(2, b"x");
        let Message(mut bytes) = message.attribute(3, b"");
        let length = u32::try_from(bytes.len()).expect("small");
        bytes[..4].copy_from_slice(&length.to_ne_bytes());
        bytes.push(7);
        let (kind, payload, rest) = split(&bytes).expect("a message");
        assert_eq!((kind, rest), (32, &[7][..]));
        let parts: Vec<_> = parts(&payload[4..]).collect();
        assert_eq!(parts, [(1, &b"nat\0"[..]), (2, b"x"), (3, b"")]);
    }

    #[test]
    fn the_number_that_ends_a_request_says_why() {
        let kind = |number: i32| outcome(&number.to_ne_bytes()).map_err(|error| error.kind());
        assert_eq!(kind(0), Ok(()));
        assert_eq!(kind(-17), Err(io::ErrorKind::AlreadyExists));
        assert_eq!(kind(-1), Err(io::ErrorKind::PermissionDenied));
        assert!(kind(i32::MIN).is_err());
        assert!(outcome(&[]).is_ok());
    }

    proptest! {
        #[test]
        fn bytes_of_any_kind_are_split_or_cut(bytes: Vec<u8>) {
            let mut rest = &bytes[..];
            while let Ok((_, _, after)) = split(rest) {
                prop_assert!(after.len() < rest.len());
                rest = after;
            }
            prop_assert!(parts(&bytes).count() <= bytes.len());
        }
    }
}
