//! The worker's end: how it gets the devices of its mounts, and gives them to a keeper that starts again.

use super::messages::{Answer, Ask, receive, send};
use super::{SOCKET_VARIABLE, end_signals};
use crate::fuse::{self, FuseSession};
use crate::fuse_wire::{UNIQUE_AT, u64_at};
use crate::handshake::Agreed;
use crate::request_memory::RequestMemory;
use crate::requests::RequestContext;
use crate::service_manager;
use crate::session::Session;
use fletch_core::{DatasetName, LayoutId, Root};
use nix::{
    fcntl::{FcntlArg, FdFlag, fcntl},
    sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket},
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    path::{Path, PathBuf},
    sync::{Arc, OnceLock, Weak},
    thread,
    time::{Duration, Instant},
};

/// How often the worker says that it lives.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// How often it asks for requests that no worker answered, where the kernel does not send them again.
const UNANSWERED_EVERY: Duration = Duration::from_millis(200);
/// How often it looks for a keeper that was started again.
const CONNECT_EVERY: Duration = Duration::from_millis(100);
/// How long a process that starts waits for its keeper.
const CONNECT_WITHIN: Duration = Duration::from_secs(10);

/// The keeper of this process. It stays connected until the last thread is gone: when the keeper sees the end
/// of the connection, nobody reads requests any more, and it has them sent again.
static KEEPER: OnceLock<Arc<Keeper>> = OnceLock::new();

/// What a worker must know to answer exactly as its predecessor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct State {
    /// The root of the mounted version. A tag may name another one by now.
    pub root: Root,
    pub layout: LayoutId,
    /// The dataset through which the mount reads.
    pub dataset: DatasetName,
    /// The directory, without links.
    pub dir: PathBuf,
    /// [`crate::fs::inode::ENCODING`].
    pub inode_encoding: u32,
}

/// What a worker calls its mounts at its keeper.
#[derive(Debug, Clone)]
pub struct MountSetName {
    /// The socket of a keeper of many processes. Without it, only a keeper that started this process counts.
    pub socket: Option<PathBuf>,
    /// The directory of this process's mounts, which is the name.
    pub dir: PathBuf,
    /// How long a mount may wait for a worker.
    pub io_timeout: Duration,
    /// Whether the directory is a file system with links.
    pub has_links: bool,
}

/// A mount that this process serves.
#[derive(Debug)]
struct Served {
    state: State,
    agreed: Agreed,
    device: Weak<OwnedFd>,
    /// What answers its requests, once it does.
    session: Weak<Session>,
}

/// The keeper of this process's mounts. The keeper sees that the worker is gone when this is closed.
#[derive(Debug)]
pub struct Keeper {
    socket: Mutex<OwnedFd>,
    set: MountSetName,
    served: Mutex<BTreeMap<PathBuf, Served>>,
    held: Mutex<Option<OwnedFd>>,
    /// The memory for requests, if the kernel does not send them again.
    memory: Mutex<Option<Arc<RequestMemory>>>,
}

/// Makes the session of a mount, with the memory for its requests and the tag of the mount there, if it needs
/// one. Has the session answer what an earlier worker did not answer, now and later.
pub(crate) fn begin(
    device: &Arc<OwnedFd>,
    new: impl FnOnce(Option<(Arc<RequestMemory>, u64)>) -> Arc<Session>,
) -> Arc<Session> {
    let Some(keeper) = KEEPER.get() else { return new(None) };
    let mut served = keeper.served.lock();
    let mount = served.values_mut().find(|mount| mount.device.as_ptr() == Arc::as_ptr(device));
    let Some(mount) = mount.filter(|mount| !mount.agreed.resend) else { return new(None) };
    let session = new(keeper.memory.lock().clone().map(|memory| (memory, mount.agreed.tag)));
    mount.session = Arc::downgrade(&session);
    drop(served);
    if let Err(error) = keeper.answer_unanswered() {
        tracing::debug!(%error, "the keeper is gone, and has unanswered requests");
    }
    session
}

impl Keeper {
    /// Returns whether a keeper started this process.
    #[must_use]
    pub fn is_there() -> bool {
        std::env::var_os(SOCKET_VARIABLE).is_some()
    }

    /// Returns the keeper that started this process, or the one at the socket of `set`. Called once, while
    /// the process has one thread.
    ///
    /// # Errors
    /// The variable names no socket, or no keeper listens at the socket of `set`.
    pub fn of_process(mut set: MountSetName) -> io::Result<Option<Arc<Self>>> {
        let socket = match (inherited_socket()?, &set.socket) {
            (Some(socket), _) => {
                set.socket = None;
                say_hello(&socket, &set)?;
                socket
            }
            (None, Some(path)) => wait_for(path, &set)?,
            (None, None) => return Ok(None),
        };
        let (served, held, memory) = (Mutex::default(), Mutex::default(), Mutex::default());
        let keeper = Arc::new(Keeper { socket: Mutex::new(socket), set, served, held, memory });
        // Set once: a process asks for its keeper once.
        drop(KEEPER.set(Arc::clone(&keeper)));
        let of = Arc::downgrade(&keeper);
        thread::Builder::new().name("fletch-keeper".into()).spawn(move || stay_in_touch(&of))?;
        Ok(Some(keeper))
    }

    /// Returns the keeper of many processes, if this process uses one. It may unmount where this process may
    /// not.
    #[must_use]
    pub fn of_many() -> Option<&'static Self> {
        KEEPER.get().map(|keeper| &**keeper).filter(|keeper| keeper.is_of_many())
    }

    /// Whether the mounts stay when this process ends: its keeper waits for the next one.
    #[must_use]
    pub fn is_of_many(&self) -> bool {
        self.set.socket.is_some()
    }

    /// Returns the mounts that are kept, in the order of their directories.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn kept(&self) -> io::Result<Vec<State>> {
        let mut all: Vec<State> = Vec::new();
        loop {
            let after = all.last().map(|state| state.dir.clone());
            match self.ask(&Ask::Kept { after }, None)? {
                (Answer::Kept(Some((_, state))), _) => all.push(serde_json::from_value(state)?),
                (Answer::Kept(None), _) => return Ok(all),
                _ => return Err(unexpected()),
            }
        }
    }

    /// Mounts, gives the mount to the keeper, and returns the session. A keeper of many processes mounts, and
    /// only the rest is done here. If the keeper is gone, the mount ends with this process.
    ///
    /// # Errors
    /// As [`crate::fuse::mount`].
    pub fn mount(
        &self,
        fs: &RequestContext,
        source: String,
        allow_other: bool,
        state: State,
    ) -> io::Result<FuseSession> {
        let device = match self.device_by_keeper(&source, allow_other, &state) {
            Ok((Some(agreed), device)) => return self.begin_session(fs, state, agreed, device),
            Ok((None, device)) => device,
            // It has no right to, or none is there that could.
            Err(e) if e.raw_os_error() == Some(libc::EPERM) || is_gone(&e) => {
                fuse::open(&state.dir, &source, allow_other)?
            }
            Err(e) => return Err(e),
        };
        let agreed = fuse::agree(&device).inspect_err(|_| fuse::abandon(&state.dir))?;
        let kept = self.ask_for(&back(&state, agreed)?, Some(device.as_fd()));
        match kept {
            Err(e) if is_gone(&e) => {
                let dir = state.dir.display();
                tracing::warn!(%dir, "the keeper is gone: a mount ends with this process");
            }
            kept => kept.inspect_err(|_| fuse::abandon(&state.dir))?,
        }
        self.begin_session(fs, state, agreed, device)
    }

    /// Has a keeper of many processes mount. Another process of the set may have agreed with the kernel, if
    /// it had the keeper mount the same before.
    fn device_by_keeper(
        &self,
        source: &str,
        allow_other: bool,
        state: &State,
    ) -> io::Result<(Option<Agreed>, OwnedFd)> {
        if !self.is_of_many() {
            return Err(io::Error::from_raw_os_error(libc::EPERM));
        }
        let (source, dir, state) = (source.to_owned(), state.dir.clone(), serde_json::to_value(state)?);
        match self.ask(&Ask::Mount { source, allow_other, dir, state }, None)? {
            (Answer::Mounted, Some(device)) => Ok((None, device)),
            (Answer::Device(agreed), Some(device)) => Ok((Some(agreed), device)),
            (answer, _) => Err(answer.into_error()),
        }
    }

    /// Takes over a mount that the keeper has.
    ///
    /// # Errors
    /// The keeper is gone, or does not have it any more.
    pub fn attach(&self, fs: &RequestContext, state: State) -> io::Result<FuseSession> {
        let (Answer::Device(agreed), Some(device)) =
            self.ask(&Ask::Attach { dir: state.dir.clone() }, None)?
        else {
            return Err(unexpected());
        };
        let session = self.begin_session(fs, state, agreed, device)?;
        fs.requests.count_takeover();
        Ok(session)
    }

    /// Has the keeper answer EIO to what reads the mount at a directory, until a worker takes it over.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn give_up(&self, dir: PathBuf) -> io::Result<()> {
        self.ask_for(&Ask::GiveUp { dir }, None)
    }

    /// Has the keeper mount a file system for links.
    ///
    /// # Errors
    /// The error of the kernel, or the keeper is gone.
    pub fn mount_links(&self, dir: &Path) -> io::Result<()> {
        self.ask_for(&Ask::MountLinks { dir: dir.to_owned() }, None)
    }

    /// Has the keeper unmount a directory.
    ///
    /// # Errors
    /// The error of the kernel, or the keeper is gone.
    pub fn unmount(&self, dir: &Path, detach: bool) -> io::Result<()> {
        self.ask_for(&Ask::Unmount { dir: dir.to_owned(), detach }, None)
    }

    /// Returns whether the keeper has ended.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.ask(&Ask::Alive, None).is_err_and(|e| is_gone(&e))
    }

    /// Has the keeper hold a descriptor for the next worker.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn hold(&self, descriptor: &impl AsFd) -> io::Result<()> {
        *self.held.lock() = Some(descriptor.as_fd().try_clone_to_owned()?);
        self.ask_for(&Ask::Hold, Some(descriptor.as_fd()))
    }

    /// Returns the descriptor that an earlier worker had the keeper hold.
    ///
    /// # Errors
    /// The keeper is gone.
    pub fn held(&self) -> io::Result<Option<OwnedFd>> {
        let (_, held) = self.ask(&Ask::Held, None)?;
        *self.held.lock() = held.as_ref().map(OwnedFd::try_clone).transpose()?;
        Ok(held)
    }

    fn begin_session(
        &self,
        fs: &RequestContext,
        state: State,
        agreed: Agreed,
        device: OwnedFd,
    ) -> io::Result<FuseSession> {
        if !agreed.resend {
            self.make_memory()?;
        }
        let session = FuseSession::new(fs, device, agreed);
        let device = Arc::downgrade(&session.device());
        let mount = Served { state, agreed, device, session: Weak::new() };
        self.served.lock().insert(mount.state.dir.clone(), mount);
        Ok(session)
    }

    /// Makes the memory for requests, unless it is there, and gives it to the keeper, too.
    fn make_memory(&self) -> io::Result<()> {
        let mut made = self.memory.lock();
        if made.is_none() {
            let memory = RequestMemory::new()?;
            self.ask_for(&Ask::Memory, Some(memory.descriptor()))?;
            *made = Some(memory);
        }
        Ok(())
    }

    /// Answers the requests that an earlier worker did not answer.
    ///
    /// # Errors
    /// The keeper is gone.
    fn answer_unanswered(&self) -> io::Result<()> {
        let mut taken = None;
        while let (Answer::Unanswered(Some((dir, message))), _) =
            self.ask(&Ask::Unanswered { taken }, None)?
        {
            // Else it is answered when its session begins.
            let session = self.served.lock().get(&dir).and_then(|mount| mount.session.upgrade());
            let (Some(session), Some(unique)) = (session, u64_at(&message, UNIQUE_AT)) else { break };
            session.answer_for_predecessor(&message);
            taken = Some((dir, unique));
        }
        Ok(())
    }

    /// Asks for something that has no answer but that it was done.
    fn ask_for(&self, ask: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<()> {
        match self.ask(ask, descriptor)? {
            (Answer::Done, _) => Ok(()),
            (answer, _) => Err(answer.into_error()),
        }
    }

    fn ask(&self, ask: &Ask, descriptor: Option<BorrowedFd<'_>>) -> io::Result<(Answer, Option<OwnedFd>)> {
        // One question at a time, so that each gets its own answer.
        ask_at(&self.socket.lock(), ask, descriptor)
    }

    /// Connects to a keeper that was started again, and gives it what the one before had.
    fn connect_again(&self, path: &Path) -> io::Result<()> {
        let socket = connect_to(path, &self.set)?;
        let done = |(answer, _): (Answer, _)| match answer {
            Answer::Done => Ok(()),
            answer => Err(answer.into_error()),
        };
        let mut served = self.served.lock();
        served.retain(|_, mount| mount.device.strong_count() > 0);
        for mount in served.values() {
            let Some(device) = mount.device.upgrade() else { continue };
            let ask = back(&mount.state, mount.agreed)?;
            if let Err(error) = ask_at(&socket, &ask, Some(device.as_fd())).and_then(done) {
                let dir = mount.state.dir.display();
                tracing::warn!(%dir, %error, "the new keeper does not keep a mount");
            }
        }
        if let Some(held) = &*self.held.lock() {
            done(ask_at(&socket, &Ask::Hold, Some(held.as_fd()))?)?;
        }
        if let Some(memory) = &*self.memory.lock() {
            done(ask_at(&socket, &Ask::Memory, Some(memory.descriptor()))?)?;
        }
        tracing::info!(mounts = served.len(), "the keeper was started again, and has the mounts back");
        *self.socket.lock() = socket;
        Ok(())
    }
}

/// Tells the keeper again and again that this process lives. Looks for another one when it is gone.
fn stay_in_touch(keeper: &Weak<Keeper>) {
    let mut is_logged = false;
    loop {
        let Some(keeper) = keeper.upgrade() else { return };
        let has_memory = keeper.memory.lock().is_some();
        let heard = if has_memory { keeper.answer_unanswered() } else { keeper.ask_for(&Ask::Alive, None) };
        let pause = match heard {
            Ok(()) => {
                is_logged = false;
                service_manager::tell(service_manager::ALIVE);
                // The first mount may need a memory.
                let has_time = !has_memory && !keeper.served.lock().is_empty();
                if has_time { ALIVE_EVERY } else { UNANSWERED_EVERY }
            }
            Err(error) => {
                if !is_logged {
                    tracing::warn!(%error, "the keeper is gone: the mounts end with this process");
                    is_logged = true;
                }
                // A keeper that started this process is not started again.
                let Some(path) = &keeper.set.socket else { return };
                if let Err(error) = keeper.connect_again(path) {
                    tracing::trace!(%error, "no keeper yet");
                }
                CONNECT_EVERY
            }
        };
        drop(keeper);
        thread::sleep(pause);
    }
}

#[expect(unsafe_code, reason = "the keeper left this descriptor open for this process alone")]
fn inherited_socket() -> io::Result<Option<OwnedFd>> {
    let Some(number) = std::env::var(SOCKET_VARIABLE).ok().and_then(|n| n.parse::<RawFd>().ok()) else {
        return Ok(None);
    };
    // SAFETY: the keeper passed the descriptor on for this process, which takes it here and nowhere else.
    let socket = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl(&socket, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))?;
    end_signals().thread_unblock()?;
    Ok(Some(socket))
}

/// Connects to a keeper, which may be starting just now.
fn wait_for(path: &Path, set: &MountSetName) -> io::Result<OwnedFd> {
    let until = Instant::now() + CONNECT_WITHIN;
    loop {
        match connect_to(path, set) {
            Err(e) if is_not_there(&e) && Instant::now() < until => thread::sleep(CONNECT_EVERY),
            connected => return connected,
        }
    }
}

/// Whether no keeper listens.
fn is_not_there(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

fn connect_to(path: &Path, set: &MountSetName) -> io::Result<OwnedFd> {
    let new = socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?;
    let to = UnixAddr::new(path)?;
    let shown = path.display();
    connect(new.as_raw_fd(), &to).map_err(|e| {
        let e = io::Error::from(e);
        io::Error::new(
            e.kind(),
            format!("no keeper listens at {shown} ({e}): start fletch-mount --hold {shown}"),
        )
    })?;
    say_hello(&new, set)?;
    Ok(new)
}

fn say_hello(socket: &OwnedFd, set: &MountSetName) -> io::Result<()> {
    let io_timeout_ms = u64::try_from(set.io_timeout.as_millis()).unwrap_or(u64::MAX);
    let hello = Ask::Hello { name: set.dir.clone(), io_timeout_ms, links: set.has_links };
    match ask_at(socket, &hello, None)? {
        (Answer::Done, _) => Ok(()),
        (answer, _) => Err(answer.into_error()),
    }
}

fn back(state: &State, agreed: Agreed) -> io::Result<Ask> {
    Ok(Ask::Back { dir: state.dir.clone(), state: serde_json::to_value(state)?, agreed })
}

fn ask_at(
    socket: &OwnedFd,
    ask: &Ask,
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<(Answer, Option<OwnedFd>)> {
    send(socket, ask, descriptor)?;
    match receive(socket)? {
        Some((answer, descriptor)) => Ok((answer?, descriptor)),
        None => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the keeper of the mount is gone")),
    }
}

/// Whether an answer says that the keeper is gone.
fn is_gone(e: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, NotConnected, UnexpectedEof};
    matches!(e.kind(), UnexpectedEof | BrokenPipe | ConnectionReset | NotConnected)
}

fn unexpected() -> io::Error {
    io::Error::other("the keeper of the mount answers something else")
}

impl Answer {
    /// Returns the error that the answer tells of, or that it is none that was asked for.
    fn into_error(self) -> io::Error {
        match self {
            Answer::Failed { errno: Some(errno), .. } => io::Error::from_raw_os_error(errno),
            Answer::Failed { is_denied, why, .. } => {
                let kind = if is_denied { io::ErrorKind::PermissionDenied } else { io::ErrorKind::Other };
                io::Error::new(kind, why)
            }
            _ => unexpected(),
        }
    }
}
