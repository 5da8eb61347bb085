//! Owns the base id that Envoys share with their successors, and the files that Envoy creates under this number: the
//! shared memory, and the sockets through which a successor gets the listening sockets of its parent.
//!
//! A process that can open these sockets can take Envoy's listeners or end Envoy, so only Envoy's user has access to the
//! directory of the sockets. Envoy does not remove the files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, Write};
use std::iter::repeat_with;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::os::unix::net;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{Access, Mode, OFlags, access, open};
use tokio::net::UnixDatagram;

use super::command::Takeover;
use crate::files::directory::Directory;
use crate::files::regular_file::if_exists;

const SHARED_MEMORY: &str = "/dev/shm";
/// Enough bytes to need a page of memory.
const PAGE: [u8; 4096] = [0; 4096];

/// Size (104) and version (11) of Envoy's structure in the shared memory, as in the hot restart version 11.104.
const SHARED_MEMORY_HEADER: [[u8; 8]; 2] = [104_u64.to_ne_bytes(), 11_u64.to_ne_bytes()];
/// The offset of the flags in this structure.
const SHARED_MEMORY_FLAGS: u64 = 96;

/// The directory of the sockets, and the beginning of their names.
const DIRECTORY: &str = "istio-agent-envoy";
const PREFIX: &str = "e";
/// Envoy appends up to 32 bytes (`_udp_parent_` and a number of 64 bits), and a socket address has 107 (unix(7)).
const MAX_SOCKET_PATH: usize = 75;

/// The sockets of an Envoy; it receives the messages of its successor at the first two.
const ROLES: [&str; 4] = ["parent", "udp_parent", "child", "udp_child"];
/// The number of epochs after which Envoy uses the same names again.
const EPOCHS: u32 = 3;
/// The factor by which Envoy multiplies the base id in the names.
const SPREAD: u32 = 10;
/// Envoy's limit for base ids that it chooses itself.
const MAX_BASE_ID: u32 = 0x0fff_ffff;

/// A base id. Dropping it removes its files.
#[derive(Debug)]
pub(super) struct BaseId {
    number: u32,
    socket_path: PathBuf,
    directory: Directory,
    /// True if the files belong to an Envoy in another container, so that they are not removed.
    is_lent: AtomicBool,
}

impl BaseId {
    /// Chooses a base id for an Envoy without a parent, with sockets below `parent` that only `user` can open. Removes
    /// what Envoys that were killed with their agent have left. Fails if Envoys cannot share memory here.
    pub(super) fn choose(parent: &Path, user: u32) -> io::Result<Self> {
        let socket_path = parent.join(DIRECTORY).join(PREFIX);
        let length = socket_path.as_os_str().len();
        if length > MAX_SOCKET_PATH {
            let path = socket_path.display();
            let found = format!("{path} has {length} bytes, expected at most {MAX_SOCKET_PATH}");
            return Err(io::Error::other(found));
        }
        let directory = Directory::private_to(user, parent, DIRECTORY, true)?;
        let left: BTreeSet<_> = directory.names()?.iter().filter_map(|name| parse(name)).collect();
        for number in left {
            remove_unused(&directory, number);
        }
        check_shared_memory()?;
        let number = repeat_with(|| fastrand::u32(..=MAX_BASE_ID))
            .find(|number| !memory_path(*number).exists());
        Ok(Self {
            number: number.unwrap_or_default(),
            socket_path,
            directory,
            is_lent: AtomicBool::new(false),
        })
    }

    /// Returns the place of the first Envoy of this base id.
    pub(super) fn first(&self) -> Takeover {
        Takeover {
            base_id: self.number,
            restart_epoch: 0,
            socket_path: self.socket_path.clone(),
            workers: None,
        }
    }

    /// Adopts the base id of an Envoy in another container, from which this agent's first Envoy takes over.
    pub(super) fn adopt(takeover: &Takeover, user: u32) -> io::Result<Self> {
        let directory = takeover.socket_path.parent().unwrap_or(Path::new(""));
        let parent = directory.parent().unwrap_or(Path::new(""));
        Ok(Self {
            number: takeover.base_id,
            socket_path: takeover.socket_path.clone(),
            directory: Directory::private_to(user, parent, DIRECTORY, false)?,
            is_lent: AtomicBool::new(true),
        })
    }

    /// Leaves the files to an Envoy in another container, or takes them over after that Envoy has exited.
    pub(super) fn set_lent(&self, is_lent: bool) {
        self.is_lent.store(is_lent, Ordering::Relaxed);
    }

    /// Allows another successor after one that has exited before it served. Envoy sets the initializing flag in the
    /// shared memory when it starts and clears it when it serves; while it is set, other Envoys refuse to start
    /// (`SharedMemory` in Envoy's `hot_restart_impl.h`: size, version, two mutexes, flags). Fails if the memory has
    /// another form.
    pub(super) fn clear_initializing_flag(&self) -> io::Result<()> {
        let flags = OFlags::RDWR | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let memory = fs::File::from(open(memory_path(self.number), flags, Mode::empty())?);
        let mut header = [0_u8; 16];
        memory.read_exact_at(&mut header, 0)?;
        if header.as_chunks().0 != SHARED_MEMORY_HEADER {
            let found = format!("unknown header {header:?}");
            return Err(io::Error::new(io::ErrorKind::InvalidData, found));
        }
        memory.write_all_at(&[0; 8], SHARED_MEMORY_FLAGS)
    }

    /// Binds the sockets at which the Envoy of this restart epoch, which has exited, would receive the messages of its
    /// successor. The successor aborts if it cannot send them.
    pub(super) fn bind_parent_sockets(&self, restart_epoch: u32) -> io::Result<[UnixDatagram; 2]> {
        Ok([self.bind(ROLES[0], restart_epoch)?, self.bind(ROLES[1], restart_epoch)?])
    }

    fn bind(&self, role: &str, restart_epoch: u32) -> io::Result<UnixDatagram> {
        let name = socket_name(role, self.number, restart_epoch);
        self.directory.remove_file(&name)?;
        let path = self.directory.path_to(&name);
        let socket = UnixDatagram::bind(&path)?;
        // A root agent binds for the Envoy of another user; no other user reaches the directory.
        fs::set_permissions(path, fs::Permissions::from_mode(0o666))?;
        Ok(socket)
    }
}

impl Drop for BaseId {
    fn drop(&mut self) {
        if !self.is_lent.load(Ordering::Relaxed) {
            remove_unused(&self.directory, self.number);
        }
    }
}

/// Fails if Envoys cannot share memory on this machine. An Envoy that finds no free page there ends with SIGBUS.
fn check_shared_memory() -> io::Result<()> {
    let checked = access(SHARED_MEMORY, Access::WRITE_OK | Access::EXEC_OK)
        .map_err(io::Error::from)
        .and_then(|()| tempfile::tempfile_in(SHARED_MEMORY)?.write_all(&PAGE));
    checked.map_err(|error| io::Error::new(error.kind(), format!("{SHARED_MEMORY}: {error}")))
}

/// Removes the files of a base id, unless an Envoy has one of the sockets.
fn remove_unused(directory: &Directory, number: u32) {
    let mut names = Vec::new();
    for role in ROLES {
        names.extend((0..EPOCHS).map(|epoch| socket_name(role, number, epoch)));
    }
    if names.iter().any(|name| is_bound(&directory.path_to(name))) {
        return;
    }
    let removed = names.iter().try_for_each(|name| directory.remove_file(name));
    if let Err(error) = removed.and_then(|()| if_exists(fs::remove_file(memory_path(number)))) {
        tracing::warn!(%error, "cannot remove the files of an Envoy that has exited");
    }
}

/// Returns true if a process receives at a socket, or if that is unknown.
fn is_bound(path: &Path) -> bool {
    use io::ErrorKind::{ConnectionRefused, NotFound};
    let connected = net::UnixDatagram::unbound().and_then(|socket| socket.connect(path));
    !connected.is_err_and(|error| matches!(error.kind(), NotFound | ConnectionRefused))
}

fn memory_path(number: u32) -> PathBuf {
    let number = u64::from(number) * u64::from(SPREAD);
    Path::new(SHARED_MEMORY).join(format!("envoy_shared_memory_{number}"))
}

/// Returns the name of a socket. Envoy converts ten times the base id to a signed number of 32 bits and then to one of
/// 64 bits without a sign.
fn socket_name(role: &str, number: u32, restart_epoch: u32) -> String {
    let spread = i64::from(number.wrapping_mul(SPREAD).cast_signed()).cast_unsigned();
    let spread = spread + u64::from(restart_epoch % EPOCHS);
    format!("{PREFIX}_{role}_{spread}")
}

fn parse(name: &str) -> Option<u32> {
    let (_, number) = name.strip_prefix(PREFIX)?.rsplit_once('_')?;
    Some(number.parse::<u64>().ok()? as u32 / SPREAD)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, symlink};

    use super::*;

    fn own() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn directory(place: &tempfile::TempDir) -> PathBuf {
        place.path().join(DIRECTORY)
    }

    /// Creates the sockets of an Envoy. They are stale once the result is dropped.
    fn sockets(place: &tempfile::TempDir, number: u32) -> Vec<net::UnixDatagram> {
        let names = ROLES.map(|role| directory(place).join(socket_name(role, number, 4)));
        names.iter().map(|name| net::UnixDatagram::bind(name).unwrap()).collect()
    }

    fn files(place: &tempfile::TempDir) -> usize {
        fs::read_dir(directory(place)).unwrap().count()
    }

    #[test]
    fn names_are_those_of_envoy() {
        for (number, restart_epoch, expected) in [
            (7, 0, "e_udp_parent_70"),
            (7, 5, "e_udp_parent_72"),
            // Seen with Envoy 1.40.0.
            (260_000_000, 0, "e_udp_parent_18446744072014584320"),
        ] {
            let name = socket_name("udp_parent", number, restart_epoch);
            assert_eq!(name, expected);
            assert_eq!(parse(&name), Some(number));
        }
        let memory = Path::new("/dev/shm/envoy_shared_memory_2600000000");
        assert_eq!(memory_path(260_000_000), memory);
        assert_eq!(parse("e_parent_x"), None);
        let longest = socket_name("udp_parent", MAX_BASE_ID, 2).len() - PREFIX.len();
        assert_eq!(MAX_SOCKET_PATH + longest, 107);
    }

    #[test]
    fn the_socket_directory_has_one_user_and_a_foreign_one_is_refused() {
        let place = tempfile::tempdir().unwrap();
        let base_id = BaseId::choose(place.path(), own()).unwrap();
        let found = directory(&place).metadata().unwrap();
        assert_eq!((found.uid(), found.mode() & 0o7777), (own(), 0o700));
        assert!(base_id.socket_path.starts_with(place.path()));
        let open = fs::Permissions::from_mode(0o750);
        fs::set_permissions(directory(&place), open).unwrap();
        let error = BaseId::choose(place.path(), own()).unwrap_err();
        assert!(error.to_string().contains("mode 750"), "{error}");
        fs::remove_dir(directory(&place)).unwrap();
        symlink("/tmp", directory(&place)).unwrap();
        BaseId::choose(place.path(), own()).unwrap_err();
        let long = place.path().join("x".repeat(60));
        let error = BaseId::choose(&long, own()).unwrap_err();
        assert!(error.to_string().contains("at most 75"), "{error}");
    }

    #[test]
    fn a_root_agent_gives_the_socket_directory_to_envoys_user() {
        if own() != 0 {
            eprintln!("Only root gives files away: this test is not run.");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        BaseId::choose(place.path(), 1337).unwrap();
        BaseId::choose(place.path(), 1337).unwrap();
        assert_eq!(directory(&place).metadata().unwrap().uid(), 1337);
        BaseId::choose(place.path(), 0).unwrap_err();
    }

    #[test]
    fn files_of_an_exited_envoy_are_removed_and_those_of_others_stay() {
        let place = tempfile::tempdir().unwrap();
        let base_id = BaseId::choose(place.path(), own()).unwrap();
        let number = base_id.number;
        fs::write(memory_path(number), "").unwrap();
        let living = sockets(&place, number);
        drop(base_id);
        assert!(files(&place) == 4 && memory_path(number).exists());
        // The next agent finds them.
        let next = BaseId::choose(place.path(), own()).unwrap();
        assert_eq!(files(&place), 4);
        drop(living);
        let another = BaseId::choose(place.path(), own()).unwrap();
        assert!(files(&place) == 0 && !memory_path(number).exists());
        drop(sockets(&place, next.number));
        next.set_lent(true);
        drop(next);
        assert_eq!(files(&place), 4, "they are another container's");
        drop(another);
    }

    #[tokio::test]
    async fn messages_for_a_dead_parent_are_received() {
        let place = tempfile::tempdir().unwrap();
        let base_id = BaseId::choose(place.path(), own()).unwrap();
        drop(sockets(&place, base_id.number));
        let [parent, _udp] = base_id.bind_parent_sockets(4).unwrap();
        let path = directory(&place).join(socket_name("parent", base_id.number, 4));
        net::UnixDatagram::unbound().unwrap().send_to(b"end", path).unwrap();
        assert_eq!(parent.recv(&mut [0; 3]).await.unwrap(), 3);
    }
}
