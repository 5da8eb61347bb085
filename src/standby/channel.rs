//! Exchanges messages between the two agents of a pod, over a Unix socket of the agent that serves.
//!
//! Each message is a line of JSON. Unknown members are ignored. A later version of the protocol
//! that an older agent cannot follow has another [`VERSION`], which the agents compare first.

use std::collections::BTreeSet;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::time::timeout;

use crate::envoy::command::Takeover;
use crate::envoy::inspect::ServingResources;
use crate::runtime::lifecycle::BoxError;

/// The version of the protocol.
pub const VERSION: u32 = 2;
/// The time limit for one answer of the other agent.
pub const ANSWER_LIMIT: Duration = Duration::from_secs(15);
/// The largest message, in bytes. It may name thousands of listeners.
const MAX_MESSAGE: usize = 4 << 20;
/// The most descriptors of a connection: more than a status port, DNS over both protocols on some addresses, and the
/// lock.
const MAX_DESCRIPTORS: usize = 64;
const CHUNK: usize = 64 << 10;

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Message {
    /// The first message of each side.
    Hello(Hello),
    /// The agent that serves asks the standby to take over. The standby connects again, and sends `Begin`.
    TakeOver,
    /// A successor asks whether it may start Envoy.
    Begin,
    /// The successor may start Envoy, and takes over once Envoy has these listeners and secrets, if they are known.
    Go(Takeover, Option<ServingResources>),
    /// The other agent ends the handover, for this reason.
    Refused(String),
    /// A successor says that its Envoy is able to serve.
    Ready,
    /// The successor serves from now on. The listening sockets and the lock come with the message.
    Commit,
    /// A successor says that its Envoy serves.
    Done,
}

impl Message {
    /// Describes a message that does not belong at this point of a handover.
    pub fn unexpected(&self) -> String {
        format!("unexpected message {self:?}")
    }
}

#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
pub struct Hello {
    pub version: u32,
    /// The name of the container.
    pub name: String,
    pub build: String,
    /// Envoy's hot restart version, or the reason why it is unknown.
    #[serde(default)]
    pub hot_restart_version: String,
    /// The mount points of volumes.
    #[serde(default)]
    pub mounts: BTreeSet<String>,
    /// Whether an agent that waits can connect to istiod, as far as its files show. None if it has not checked this.
    #[serde(default)]
    pub self_check: Option<Result<(), String>>,
}

impl Hello {
    /// Returns the reason why this agent cannot take over from the other one.
    pub fn takeover_blocker(&self, serving: &Self) -> Option<String> {
        if let Some(Err(why)) = &self.self_check {
            return Some(why.clone());
        }
        let found = &self.hot_restart_version;
        let expected = &serving.hot_restart_version;
        // A version begins with a digit, the reason why there is none does not.
        if !found.starts_with(|c: char| c.is_ascii_digit()) {
            return Some(format!("the hot restart version of its Envoy is unknown ({found})"));
        } else if found != expected {
            return Some(format!(
                "its Envoy has the hot restart version {found}, expected {expected}"
            ));
        }
        let missing: Vec<_> = serving.mounts.difference(&self.mounts).cloned().collect();
        (!missing.is_empty()).then(|| format!("nothing is mounted at {}", missing.join(", ")))
    }
}

/// A connection between both agents.
#[derive(Debug)]
pub struct Channel {
    stream: UnixStream,
    received: Vec<u8>,
    descriptors: Vec<OwnedFd>,
    max_descriptors: usize,
}

impl Channel {
    /// Connects to the agent that serves, which passes its sockets.
    pub async fn connect(path: &Path) -> io::Result<Self> {
        Self::new(UnixStream::connect(path).await?, MAX_DESCRIPTORS)
    }

    /// Uses a connection that the agent that serves has accepted. The other agent passes no descriptors.
    pub fn accepted(stream: UnixStream) -> io::Result<Self> {
        Self::new(stream, 0)
    }

    /// Fails unless the process at the other end runs as this user.
    fn new(stream: UnixStream, max_descriptors: usize) -> io::Result<Self> {
        let peer = stream.peer_cred()?.uid();
        let own = rustix::process::geteuid();
        if peer != own.as_raw() {
            let found = format!("the other process runs as user {peer}, expected {own:?}");
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, found));
        }
        Ok(Self { stream, received: Vec::new(), descriptors: Vec::new(), max_descriptors })
    }

    /// Exchanges the first messages. Fails if the other agent has another version of the protocol.
    pub async fn greet(&mut self, hello: &Hello) -> Result<Hello, BoxError> {
        self.send(&Message::Hello(hello.clone())).await?;
        match self.receive_answer().await? {
            Message::Hello(other) if other.version == VERSION => Ok(other),
            Message::Hello(other) => Err(format!(
                "the agent {} has version {} of the handover protocol, this agent has {VERSION}",
                other.build, other.version
            )
            .into()),
            other => Err(other.unexpected().into()),
        }
    }

    pub async fn send(&mut self, message: &Message) -> io::Result<()> {
        self.send_with(message, &[]).await
    }

    /// Sends descriptors too, of which the other process gets duplicates (unix(7), `SCM_RIGHTS`).
    pub async fn send_with(&mut self, message: &Message, fds: &[OwnedFd]) -> io::Result<()> {
        let mut line = serde_json::to_vec(message)?;
        line.push(b'\n');
        let mut unsent = line.as_slice();
        let mut fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
        while !unsent.is_empty() {
            let stream = &self.stream;
            let sent = stream.async_io(Interest::WRITABLE, || write(stream, unsent, &fds)).await?;
            fds.clear();
            unsent = unsent.get(sent..).unwrap_or_default();
        }
        Ok(())
    }

    /// Waits for the next message. The future may be dropped: a later call continues.
    pub async fn receive(&mut self) -> io::Result<Message> {
        loop {
            if let Some(end) = memchr::memchr(b'\n', &self.received) {
                let line: Vec<_> = self.received.drain(..=end).collect();
                return Ok(serde_json::from_slice(&line)?);
            }
            if self.received.len() > MAX_MESSAGE {
                return Err(invalid(format!("a message has more than {MAX_MESSAGE} bytes")));
            }
            let Self { stream, received, descriptors, .. } = self;
            let length =
                stream.async_io(Interest::READABLE, || read(stream, received, descriptors)).await?;
            if self.descriptors.len() > self.max_descriptors {
                return Err(invalid(format!("more than {} descriptors", self.max_descriptors)));
            }
            if length == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// Waits for an answer, at most [`ANSWER_LIMIT`]. Fails if it is [`Message::Refused`].
    pub async fn receive_answer(&mut self) -> Result<Message, BoxError> {
        match timeout(ANSWER_LIMIT, self.receive()).await?? {
            Message::Refused(why) => Err(why.into()),
            message => Ok(message),
        }
    }

    /// Takes the descriptors that have been received so far.
    pub fn take_descriptors(&mut self) -> Vec<OwnedFd> {
        std::mem::take(&mut self.descriptors)
    }
}

fn invalid(found: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, found)
}

/// Sends bytes and descriptors. Returns the number of bytes that were sent.
fn write(stream: &UnixStream, unsent: &[u8], fds: &[BorrowedFd<'_>]) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
        return Err(io::Error::other("too many descriptors"));
    }
    Ok(sendmsg(stream, &[IoSlice::new(unsent)], &mut control, SendFlags::NOSIGNAL)?)
}

/// Reads a chunk and its descriptors. Returns the number of bytes.
fn read(
    stream: &UnixStream,
    received: &mut Vec<u8>,
    descriptors: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_DESCRIPTORS))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut chunk = vec![0; CHUNK];
    let read =
        recvmsg(stream, &mut [IoSliceMut::new(&mut chunk)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(given) = message {
            descriptors.extend(given);
        }
    }
    received.extend(chunk.iter().take(read.bytes));
    Ok(read.bytes)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net;

    use super::*;

    fn pair() -> (Channel, Channel) {
        let (one, other) = UnixStream::pair().unwrap();
        [one, other].map(|it| Channel::new(it, MAX_DESCRIPTORS).unwrap()).into()
    }

    fn hello(version: u32) -> Hello {
        Hello {
            version,
            name: "istio-proxy".to_owned(),
            build: "1.31".to_owned(),
            hot_restart_version: "11.104".to_owned(),
            mounts: BTreeSet::from(["/etc/istio/proxy".to_owned()]),
            self_check: None,
        }
    }

    #[tokio::test]
    async fn a_message_brings_its_descriptors_and_may_be_long() {
        let (mut one, mut other) = pair();
        let (given, mut kept) = net::UnixStream::pair().unwrap();
        let long = Message::Refused("x".repeat(1 << 20));
        let sending = async {
            one.send(&long).await.unwrap();
            one.send_with(&Message::Commit, &[given.into()]).await.unwrap();
        };
        let receiving = async {
            assert_eq!(other.receive().await.unwrap(), long);
            assert_eq!(other.receive().await.unwrap(), Message::Commit);
        };
        tokio::join!(sending, receiving);
        let received: Vec<_> = other.take_descriptors();
        let mut received = net::UnixStream::from(received.into_iter().next().unwrap());
        received.write_all(b"x").unwrap();
        kept.read_exact(&mut [0]).unwrap();
    }

    #[tokio::test]
    async fn an_agent_of_another_version_is_refused_unknown_members_are_not() {
        let (mut one, mut other) = pair();
        let (this, later) = (hello(VERSION), hello(3));
        let (greeted, refused) = tokio::join!(one.greet(&this), other.greet(&later));
        let error = greeted.unwrap_err().to_string();
        assert!(error.contains("1.31 has version 3 of the handover protocol"), "{error}");
        assert_eq!(refused.unwrap(), hello(VERSION));
        let (mut one, other) = pair();
        let line = b"{\"hello\":{\"version\":2,\"name\":\"a\",\"build\":\"b\",\"more\":[1]}}\n";
        other.stream.try_write(line).unwrap();
        assert_eq!(one.greet(&hello(VERSION)).await.unwrap().name, "a");
    }

    #[test]
    fn an_agent_lacking_a_mount_or_hot_restart_version_cannot_take_over() {
        let serving = hello(VERSION);
        assert_eq!(serving.takeover_blocker(&serving), None);
        let mut other = serving.clone();
        other.mounts.insert("/more".to_owned());
        assert_eq!(other.takeover_blocker(&serving), None);
        let found = serving.takeover_blocker(&other).unwrap();
        assert_eq!(found, "nothing is mounted at /more");
        other.hot_restart_version = "11.120".to_owned();
        let found = other.takeover_blocker(&serving).unwrap();
        assert!(found.contains("11.120, expected 11.104"), "{found}");
        other.hot_restart_version = "/envoy: cannot be run".to_owned();
        let found = other.takeover_blocker(&serving).unwrap();
        let unknown = "the hot restart version of its Envoy is unknown (/envoy: cannot be run)";
        assert_eq!(found, unknown);
        other.self_check = Some(Err("there is no token".to_owned()));
        let sent = serde_json::to_string(&other).unwrap();
        assert_eq!(serde_json::from_str::<Hello>(&sent).unwrap(), other);
        assert_eq!(other.takeover_blocker(&serving).as_deref(), Some("there is no token"));
    }

    #[tokio::test]
    async fn a_connection_passes_no_more_descriptors_than_the_protocol_has() {
        for (max, messages) in [(0, 1), (MAX_DESCRIPTORS, 2)] {
            let (mut one, mut other) = pair();
            other.max_descriptors = max;
            let file = std::fs::File::open("/dev/null").unwrap();
            let fds: Vec<OwnedFd> =
                (0..MAX_DESCRIPTORS).map(|_| file.try_clone().unwrap().into()).collect();
            for _ in 1..messages {
                one.send_with(&Message::Ready, &fds).await.unwrap();
                assert_eq!(other.receive().await.unwrap(), Message::Ready);
            }
            one.send_with(&Message::Ready, &fds).await.unwrap();
            let error = other.receive().await.unwrap_err();
            assert!(error.to_string().ends_with("descriptors"), "{error}");
        }
    }

    #[tokio::test]
    async fn an_invalid_or_incomplete_handover_message_is_an_error() {
        for (bytes, expected) in [
            (&b"{}\n"[..], io::ErrorKind::InvalidData),
            (b"\xff\n", io::ErrorKind::InvalidData),
            (b"\"ready\"", io::ErrorKind::UnexpectedEof),
            (b"", io::ErrorKind::UnexpectedEof),
        ] {
            let (mut one, other) = pair();
            other.stream.try_write(bytes).ok();
            drop(other);
            assert_eq!(one.receive().await.unwrap_err().kind(), expected, "{bytes:?}");
        }
    }
}
