//! Receives the kernel's requests, and sends one reply to each.
//!
//! A process with one mount has threads that wait in a read of its device ([`serve_alone`]). A process with
//! hundreds of mounts cannot afford threads for each: there, all threads wait for all devices (`epoll`,
//! level-triggered; [`SessionThreads`]).
//!
//! 1. Every request gets exactly one reply, also if its work is dropped: then the reply is EIO. A process
//!    that leaves its mounts to the next one sends no reply any more ([`crate::leaving`]): its work is
//!    dropped.
//! 2. A thread takes at most [`REQUESTS_IN_A_ROW`] requests of a session, and then looks at the others.
//! 3. On a kernel that sends no request again, a request lies in [`crate::request_memory`] until its reply is
//!    written.
//! 4. A thread of many sessions never waits in a read of a device: another thread may have taken the request
//!    that it was woken for.

use crate::fs::tree::DirEntry;
use crate::fuse_wire::{self as wire, Listing, ListingReply, Operation, Request};
use crate::handshake::MESSAGE_BYTES_MAX;
use crate::keeper;
use crate::leaving;
use crate::metrics::Op;
use crate::request_memory::{RequestMemory, Slot};
use crate::requests::RequestContext;
use nix::{
    errno::Errno,
    fcntl::{FcntlArg, OFlag, fcntl},
    sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
};
use parking_lot::RwLock;
use std::{
    collections::HashMap,
    io::{self, IoSlice},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
};
use tokio::runtime::Handle;

/// The requests of one session that a thread takes before it looks at the other sessions.
const REQUESTS_IN_A_ROW: usize = 16;
/// The events that one wait returns at most.
const EVENTS_MAX: usize = 16;
const PAGE_BYTES: usize = 4096;
/// The kernel refuses to fill a buffer that is shorter than the longest message plus its header.
pub(crate) const BUFFER_BYTES: usize = MESSAGE_BYTES_MAX as usize + PAGE_BYTES;

/// Returns the buffer into which a thread reads requests.
///
/// Its pages are there before the kernel copies into them. If a process is killed while the kernel waits for
/// a page there, the program that asked gets EIO, and no successor sees the request.
fn request_buffer() -> Vec<u8> {
    let mut buffer = vec![0; BUFFER_BYTES];
    buffer.iter_mut().step_by(PAGE_BYTES).for_each(|byte| *byte = std::hint::black_box(1));
    buffer
}

/// Serves one mount until it is gone, with threads of its own. Work that has to wait moves to `runtime`.
/// Blocks.
///
/// # Errors
/// The device failed.
pub fn serve_alone(
    device: Arc<OwnedFd>,
    context: Arc<RequestContext>,
    threads: usize,
    runtime: Handle,
) -> io::Result<()> {
    let session = Session::begin(device, context, runtime, SessionEnd::default());
    std::thread::scope(|scope| {
        let receive = |i| {
            let builder = std::thread::Builder::new().name(format!("fletch-fuse-{i}"));
            let started = builder.spawn_scoped(scope, || session.receive_all());
            // This thread serves the mount by itself then.
            started.inspect_err(|error| tracing::warn!(%error, "a thread of the mount does not start")).ok()
        };
        let others: Vec<_> = (1..threads).filter_map(receive).collect();
        let own = session.receive_all();
        let ended = others.into_iter().map(|thread| match thread.join() {
            Ok(ended) => ended,
            Err(panic) => std::panic::resume_unwind(panic),
        });
        ended.fold(own, |first, next| first.and(next))
    })
}

/// The threads that receive the requests of all sessions. They run until the process ends.
pub struct SessionThreads(Arc<Shared>);

struct Shared {
    epoll: Epoll,
    sessions: RwLock<HashMap<u64, Arc<Session>>>,
    next: AtomicU64,
    runtime: Handle,
}

/// Whether a session still serves its mount.
#[derive(Debug, Clone, Default)]
pub struct SessionEnd(Arc<AtomicBool>);

impl SessionEnd {
    /// Returns whether the mount is gone, or its device failed.
    #[must_use]
    pub fn has_come(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

impl SessionThreads {
    /// Starts the threads. Work that has to wait moves to `runtime`.
    ///
    /// # Errors
    /// The system cannot start a thread, or has no room for another `epoll` instance.
    pub fn start(threads: usize, runtime: Handle) -> io::Result<Self> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let (sessions, next) = (RwLock::default(), AtomicU64::new(0));
        let shared = Arc::new(Shared { epoll, sessions, next, runtime });
        for i in 0..threads {
            let shared = Arc::clone(&shared);
            std::thread::Builder::new().name(format!("fletch-fuse-{i}")).spawn(move || shared.work())?;
        }
        Ok(SessionThreads(shared))
    }

    /// Begins to serve the session of `device`, whose requests `context` answers.
    ///
    /// # Errors
    /// The system cannot wait for the device.
    pub fn serve(&self, device: Arc<OwnedFd>, context: Arc<RequestContext>) -> io::Result<SessionEnd> {
        let flags = OFlag::from_bits_retain(fcntl(&device, FcntlArg::F_GETFL)?);
        fcntl(&device, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let (shared, end) = (&self.0, SessionEnd::default());
        let key = shared.next.fetch_add(1, Ordering::Relaxed);
        let session = Session::begin(device, context, shared.runtime.clone(), end.clone());
        let event = EpollEvent::new(EpollFlags::EPOLLIN, key);
        let mut sessions = shared.sessions.write();
        shared.epoll.add(&*session.device, event)?;
        sessions.insert(key, session);
        Ok(end)
    }
}

impl Shared {
    fn work(&self) {
        let mut buffer = request_buffer();
        let mut events = [EpollEvent::empty(); EVENTS_MAX];
        loop {
            let ready = match self.epoll.wait(&mut events, EpollTimeout::NONE) {
                Ok(ready) => ready,
                Err(Errno::EINTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "a thread of the mounts ended: please report this line");
                    return;
                }
            };
            for event in &events[..ready] {
                let key = event.data();
                let sessions = self.sessions.read();
                let session = sessions.get(&key).cloned();
                drop(sessions);
                let Some(session) = session else { continue };
                match session.receive_some(&mut buffer) {
                    Ok(true) => {}
                    Ok(false) => self.end(key, &session),
                    Err(error) => {
                        tracing::error!(%error, "the session of a mount failed: please report this line");
                        self.end(key, &session);
                    }
                }
            }
        }
    }

    fn end(&self, key: u64, session: &Session) {
        let mut sessions = self.sessions.write();
        // Another thread may have removed it before.
        if sessions.remove(&key).is_some()
            && let Err(error) = self.epoll.delete(&*session.device)
        {
            tracing::error!(%error, "cannot leave the device of a mount: please report this line");
        }
        session.end.0.store(true, Ordering::Release);
    }
}

/// One session: the device of a mount, and what answers its requests.
pub(crate) struct Session {
    device: Arc<OwnedFd>,
    context: Arc<RequestContext>,
    runtime: Handle,
    end: SessionEnd,
    /// The memory for the requests, and the tag of this mount there.
    memory: Option<(Arc<RequestMemory>, u64)>,
}

impl Session {
    fn begin(
        device: Arc<OwnedFd>,
        context: Arc<RequestContext>,
        runtime: Handle,
        end: SessionEnd,
    ) -> Arc<Self> {
        keeper::begin(&Arc::clone(&device), |memory| {
            Arc::new(Session { device, context, runtime, end, memory })
        })
    }

    /// Answers a request that a process before this one did not answer.
    pub fn answer_for_predecessor(&self, message: &[u8]) {
        let (Some((memory, tag)), Ok(request)) = (&self.memory, wire::parse(message)) else { return };
        let mut slot = memory.take(*tag);
        slot.fill(message);
        self.context.requests.count_resent();
        self.answer(request, Some(slot));
    }

    /// Answers requests until the mount is gone.
    fn receive_all(&self) -> io::Result<()> {
        let mut buffer = request_buffer();
        while self.receive_some(&mut buffer)? {}
        Ok(())
    }

    /// Answers some requests. Returns whether the mount still exists.
    fn receive_some(&self, buffer: &mut [u8]) -> io::Result<bool> {
        for _ in 0..REQUESTS_IN_A_ROW {
            let mut slot = self.memory.as_ref().map(|(memory, tag)| memory.take(*tag));
            let place = slot.as_mut().map_or(&mut *buffer, Slot::bytes);
            match nix::unistd::read(&*self.device, place) {
                Ok(len) => {
                    let request = wire::parse(&place[..len]).map_err(io::Error::other)?;
                    if request.operation == Operation::Destroy {
                        return Ok(false);
                    }
                    self.answer(request, slot);
                }
                Err(Errno::EAGAIN) => return Ok(true),
                // The program that asked was killed, or a signal arrived.
                Err(Errno::ENOENT | Errno::EINTR) => {}
                Err(Errno::ENODEV) => return Ok(false),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }

    fn answer(&self, Request { unique, ino, pid, operation }: Request, slot: Option<Slot>) {
        let reply = Reply { device: Arc::clone(&self.device), unique, sent: false, slot };
        let (context, runtime) = (&self.context, &self.runtime);
        if wire::is_resent(unique) {
            context.requests.count_resent();
        }
        match operation {
            Operation::Lookup(name) => context.dispatch(Op::Lookup, runtime, |fs| async move {
                let found = fs.run(fs.tree.lookup(ino, &name)).await;
                if let Ok(Some(attr)) = &found {
                    fs.record_lookup(ino, &name, attr.ino);
                }
                reply.send(found.map(|attr| wire::entry_out(&fs.common, attr.as_ref())));
            }),
            Operation::Getattr => context.dispatch(Op::Getattr, runtime, |fs| async move {
                let found = fs.run(fs.tree.attr(ino)).await;
                reply.send(found.map(|attr| wire::attr_out(&fs.common, &attr)));
            }),
            Operation::Readlink => context.dispatch(Op::Readlink, runtime, |fs| async move {
                reply.send(fs.run(fs.tree.target(ino)).await);
            }),
            Operation::Read { offset, size, direct } => context.dispatch(Op::Read, runtime, |fs| {
                fs.read((ino, offset, size), direct, pid, move |outcome| reply.send(outcome))
            }),
            Operation::Readdir(part) => self.list(Op::Readdir, ino, part, reply),
            Operation::Readdirplus(part) => self.list(Op::Readdirplus, ino, part, reply),
            Operation::Getxattr { name, size } => match context.foreign_xattr(&name) {
                Some(errno) => reply.send(Err::<&[u8], _>(errno)),
                None => context.dispatch(Op::Xattr, runtime, |fs| async move {
                    send_xattr(fs.run(fs.tree.xattr(ino, &name)).await, size, reply);
                }),
            },
            Operation::Listxattr { size } => context.dispatch(Op::Xattr, runtime, |fs| async move {
                send_xattr(fs.run(fs.tree.xattr_names(ino)).await, size, reply);
            }),
            Operation::Statfs => {
                context.requests.count(Op::Statfs);
                reply.send(Ok(wire::statfs_out(context.tree.totals())));
            }
            Operation::Open => {
                context.requests.count(Op::Open);
                // After one ENOSYS the kernel opens files without a request and keeps their pages.
                let opens_itself = context.no_open.load(Ordering::Relaxed);
                reply.send(if opens_itself { Err(libc::ENOSYS) } else { Ok(wire::file_opened()) });
            }
            Operation::Opendir => {
                context.requests.count(Op::Opendir);
                let opens_itself = context.no_opendir.load(Ordering::Relaxed);
                reply.send(if opens_itself { Err(libc::ENOSYS) } else { Ok(wire::dir_opened()) });
            }
            Operation::Release => reply.send(Ok::<&[u8], i32>(&[])),
            Operation::Forget => reply.without_message(),
            Operation::Destroy | Operation::Other => {
                // After one ENOSYS the kernel sends no more such requests, and handles them itself where it
                // can.
                context.requests.count(Op::Other);
                reply.send(Err::<&[u8], _>(libc::ENOSYS));
            }
        }
    }

    fn list(&self, op: Op, ino: u64, part: Listing, reply: Reply) {
        self.context.dispatch(op, &self.runtime, |fs| async move {
            let has_attributes = op == Op::Readdirplus;
            let mut listing = ListingReply::new(part.size, has_attributes);
            let add = |entry: DirEntry| {
                if has_attributes {
                    fs.record_lookup(ino, entry.name.as_bytes(), entry.attr.ino);
                }
                listing.add(&fs.common, &entry)
            };
            let outcome = fs.run(fs.tree.list(ino, part.offset, add)).await;
            reply.send(outcome.map(|()| listing.into_bytes()));
        });
    }
}

fn send_xattr(value: Result<Vec<u8>, i32>, size: u32, reply: Reply) {
    match value {
        Ok(v) if size == 0 => reply.send(Ok(wire::xattr_length(v.len()))),
        Ok(v) if v.len() > size as usize => reply.send(Err::<Vec<u8>, _>(libc::ERANGE)),
        value => reply.send(value),
    }
}

/// The reply to one request.
struct Reply {
    device: Arc<OwnedFd>,
    unique: u64,
    sent: bool,
    /// Where the request lies, which is free after the reply.
    slot: Option<Slot>,
}

impl Reply {
    fn send<T: AsRef<[u8]>>(mut self, outcome: Result<T, i32>) {
        match &outcome {
            Ok(payload) => self.write(0, payload.as_ref()),
            Err(errno) => self.write(*errno, &[]),
        }
    }

    /// Ends a request that has no reply.
    fn without_message(mut self) {
        self.sent = true;
    }

    fn write(&mut self, errno: i32, payload: &[u8]) {
        self.sent = true;
        if leaving::is_silent() {
            self.slot.take().into_iter().for_each(Slot::leave);
            return;
        }
        let header = wire::out_header(self.unique, errno, payload.len());
        let parts = [IoSlice::new(&header), IoSlice::new(payload)];
        // ENOENT: the program that asked was killed. ENODEV: the mount is gone. Nobody waits then.
        if let Err(error) = nix::sys::uio::writev(self.device.as_fd(), &parts) {
            tracing::debug!(%error, "the kernel did not take a reply");
        }
        self.slot = None;
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if !self.sent {
            self.write(libc::EIO, &[]);
        }
    }
}
