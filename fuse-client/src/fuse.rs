//! The FUSE adapter, and the only file that names the FUSE crate. For each request of the kernel it makes one
//! call into [`crate::requests`] and sends one reply.
//!
//! It also opens sessions for `shared_session`, which serves them without the crate's threads.

use crate::access::{Access, KernelCache};
use crate::fs::attr::{Attr, InodeKind};
use crate::fs::tree::DirEntry;
use crate::metrics::Op;
use crate::push::PageCache;
use crate::requests::{BLOCK_BYTES, NAME_BYTES_MAX, RequestContext, TTL};
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, InitFlags,
    KernelConfig, LockOwner, MountOption, Notifier, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyLseek, ReplyOpen, ReplyStatfs, ReplyXattr, Request,
    Session, SessionACL,
};
use std::{
    ffi::OsStr,
    future::Future,
    io,
    os::fd::{AsFd, OwnedFd},
    os::unix::ffi::OsStrExt,
    path::Path,
    sync::Arc,
    sync::atomic::Ordering::Relaxed,
};
use tokio::runtime::Handle;

/// The READs of its read-ahead that the kernel may have in flight.
const BACKGROUND_MAX: u16 = 128;
/// The longest message body, which also bounds the reply to a READ.
pub const MESSAGE_BYTES_MAX: u32 = 1 << 20;
const GENERATION: Generation = Generation(0);

/// The options of the FUSE session.
#[derive(Debug, Clone, Copy)]
pub struct MountOptions {
    /// Whether other users may read.
    pub allow_other: bool,
    /// FUSE threads, each with its own descriptor.
    pub threads: usize,
}

fn file_attr(fs: &RequestContext, a: &Attr) -> FileAttr {
    let at = fs.common.created;
    FileAttr {
        ino: INodeNo(a.ino),
        size: a.size,
        blocks: a.blocks(),
        atime: at,
        mtime: at,
        ctime: at,
        crtime: at,
        kind: file_type(a.kind),
        perm: a.kind.mode(),
        // 1 for directories too: `find` then infers no number of subdirectories from it.
        nlink: 1,
        uid: fs.common.uid,
        gid: fs.common.gid,
        rdev: 0,
        blksize: crate::fs::attr::IO_BYTES,
        flags: 0,
    }
}

/// Returns the negative entry: the kernel caches "no such name" for as long as it caches names.
fn negative(fs: &RequestContext) -> FileAttr {
    file_attr(fs, &Attr { ino: 0, kind: InodeKind::File, size: 0 })
}

fn file_type(kind: InodeKind) -> FileType {
    match kind {
        InodeKind::Directory => FileType::Directory,
        InodeKind::File => FileType::RegularFile,
        InodeKind::Symlink => FileType::Symlink,
    }
}

/// A mounted session that does not serve requests yet.
pub struct FuseSession {
    session: Session<Adapter>,
    notifier: Notifier,
    access: Arc<Access>,
}

/// Mounts at `dir` and negotiates the FUSE protocol with the kernel.
///
/// # Errors
/// The error of the kernel or of `fusermount3`.
pub fn mount(
    fs: Arc<RequestContext>,
    dir: &Path,
    name: &str,
    options: MountOptions,
    runtime: Handle,
) -> io::Result<FuseSession> {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::RO,
        MountOption::NoAtime,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::DefaultPermissions,
        MountOption::FSName(name.to_owned()),
        // As a custom option: the crate passes `Subtype` to fusermount3 only, but the kernel takes it too.
        MountOption::CUSTOM("subtype=fletch".to_owned()),
    ];
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(options.threads);
    config.clone_fd = options.threads > 1;
    let access = Arc::clone(&fs.access);
    let adapter = Adapter { fs, runtime };
    let session = Session::new(adapter, dir, &config)?;
    let notifier = session.notifier();
    Ok(FuseSession { session, notifier, access })
}

impl FuseSession {
    /// Returns the kernel's page cache, for pushing.
    #[must_use]
    pub fn page_cache(&self) -> impl PageCache + use<> {
        FusePageCache(self.notifier.clone(), Arc::clone(&self.access))
    }

    /// Returns the kernel's caches, for invalidation.
    #[must_use]
    pub fn kernel_cache(&self) -> Arc<dyn KernelCache> {
        Arc::new(KernelNotifier(self.notifier.clone()))
    }

    /// Returns the device from which the requests of this mount are read, and to which replies are written.
    ///
    /// The mount must not be dropped while the device is used: that unmounts it.
    ///
    /// # Errors
    /// The process has too many open files.
    pub fn device(&self) -> io::Result<OwnedFd> {
        self.session.as_fd().try_clone_to_owned()
    }

    /// Serves requests until the mount is gone. Blocks.
    ///
    /// # Errors
    /// The error that ended the session, if it was not the unmount.
    pub fn serve(self) -> io::Result<()> {
        self.session.run()
    }
}

struct KernelNotifier(Notifier);

impl KernelCache for KernelNotifier {
    fn invalidate_inode(&self, ino: u64) -> io::Result<()> {
        self.0.inval_inode(INodeNo(ino), 0, 0)
    }

    fn forget_attributes(&self, ino: u64) -> io::Result<()> {
        // A negative offset stands for no page.
        self.0.inval_inode(INodeNo(ino), -1, 0)
    }

    fn invalidate_name(&self, parent: u64, name: &[u8]) -> io::Result<()> {
        self.0.inval_entry(INodeNo(parent), OsStr::from_bytes(name))
    }
}

struct FusePageCache(Notifier, Arc<Access>);

impl PageCache for FusePageCache {
    fn store(&self, ino: u64, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let _in_flight = self.1.enter();
        if let Some(errno) = self.1.refused() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        self.0.store(INodeNo(ino), offset, bytes)
    }
}

struct Adapter {
    fs: Arc<RequestContext>,
    runtime: Handle,
}

impl Adapter {
    fn dispatch<F>(&self, op: Op, work: impl FnOnce(Arc<RequestContext>) -> F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.fs.dispatch(op, &self.runtime, work);
    }
}

fn errno(code: i32) -> Errno {
    Errno::from_i32(code)
}

impl Filesystem for Adapter {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        let wanted = [
            InitFlags::FUSE_ASYNC_READ,
            InitFlags::FUSE_PARALLEL_DIROPS,
            InitFlags::FUSE_DO_READDIRPLUS,
            InitFlags::FUSE_READDIRPLUS_AUTO,
            InitFlags::FUSE_CACHE_SYMLINKS,
            InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        ];
        for flag in wanted {
            if config.add_capabilities(flag).is_err() {
                tracing::debug!(?flag, "the kernel does not support this FUSE feature");
            }
        }
        let no_open = config.add_capabilities(InitFlags::FUSE_NO_OPEN_SUPPORT).is_ok();
        let no_opendir = config.add_capabilities(InitFlags::FUSE_NO_OPENDIR_SUPPORT).is_ok();
        self.fs.no_open.store(no_open, Relaxed);
        self.fs.no_opendir.store(no_opendir, Relaxed);
        let bound = |e| io::Error::other(format!("the kernel allows at most {e} requests in the background"));
        config.set_max_background(BACKGROUND_MAX).map_err(bound)?;
        config
            .set_max_write(MESSAGE_BYTES_MAX)
            .map_err(|e| io::Error::other(format!("the kernel allows messages of at most {e} bytes")))?;
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.as_bytes().to_vec();
        self.dispatch(Op::Lookup, |fs| async move {
            match fs.run(fs.tree.lookup(parent.0, &name)).await {
                Ok(Some(attr)) => {
                    fs.record_lookup(parent.0, &name, attr.ino);
                    reply.entry(&TTL, &file_attr(&fs, &attr), GENERATION);
                }
                Ok(None) => reply.entry(&TTL, &negative(&fs), GENERATION),
                Err(e) => reply.error(errno(e)),
            }
        });
    }

    fn forget(&self, _: &Request, _: INodeNo, _: u64) {}

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.dispatch(Op::Getattr, |fs| async move {
            match fs.run(fs.tree.attr(ino.0)).await {
                Ok(attr) => reply.attr(&TTL, &file_attr(&fs, &attr)),
                Err(e) => reply.error(errno(e)),
            }
        });
    }

    fn readlink(&self, _: &Request, ino: INodeNo, reply: ReplyData) {
        self.dispatch(Op::Readlink, |fs| async move {
            match fs.run(fs.tree.target(ino.0)).await {
                Ok(target) => reply.data(target.as_bytes()),
                Err(e) => reply.error(errno(e)),
            }
        });
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.fs.requests.count(Op::Open);
        // After one ENOSYS the kernel opens files without a request and keeps their pages.
        if self.fs.no_open.load(Relaxed) {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
        }
    }

    fn read(
        &self,
        request: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let (direct, pid) = (flags.0 & libc::O_DIRECT != 0, request.pid());
        self.dispatch(Op::Read, |fs| {
            fs.read((ino.0, offset, size), direct, pid, move |outcome| match outcome {
                Ok(bytes) => reply.data(bytes),
                Err(e) => reply.error(errno(e)),
            })
        });
    }

    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.fs.requests.count(Op::Opendir);
        if self.fs.no_opendir.load(Relaxed) {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
        }
    }

    fn readdir(&self, _: &Request, ino: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        self.dispatch(Op::Readdir, |fs| async move {
            let add = |l: DirEntry| reply.add(INodeNo(l.attr.ino), l.offset, file_type(l.attr.kind), l.name);
            match fs.run(fs.tree.list(ino.0, offset, add)).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(e)),
            }
        });
    }

    fn readdirplus(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        self.dispatch(Op::Readdirplus, |fs| async move {
            let add = |l: DirEntry| {
                let attr = file_attr(&fs, &l.attr);
                fs.record_lookup(ino.0, l.name.as_bytes(), l.attr.ino);
                reply.add(attr.ino, l.offset, l.name, &TTL, &attr, GENERATION)
            };
            match fs.run(fs.tree.list(ino.0, offset, add)).await {
                Ok(()) => reply.ok(),
                Err(e) => reply.error(errno(e)),
            }
        });
    }

    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.fs.requests.count(Op::Statfs);
        let t = self.fs.tree.totals();
        let (blocks, io) = (t.bytes.div_ceil(u64::from(BLOCK_BYTES)), crate::fs::attr::IO_BYTES);
        reply.statfs(blocks, 0, 0, t.entries, 0, io, NAME_BYTES_MAX, BLOCK_BYTES);
    }

    fn getxattr(&self, _: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        if let Some(e) = self.fs.foreign_xattr(name.as_bytes()) {
            return reply.error(errno(e));
        }
        let name = name.as_bytes().to_vec();
        self.dispatch(Op::Xattr, |fs| async move {
            let value = fs.run(fs.tree.xattr(ino.0, &name)).await;
            send_xattr(value, size, reply);
        });
    }

    fn listxattr(&self, _: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        self.dispatch(Op::Xattr, |fs| async move {
            let value = fs.run(fs.tree.xattr_names(ino.0)).await;
            send_xattr(value, size, reply);
        });
    }

    // After one ENOSYS to any of these requests the kernel sends it no more, and handles it itself where it
    // can.

    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        self.fs.requests.count(Op::Other);
        reply.error(Errno::ENOSYS);
    }

    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.fs.requests.count(Op::Other);
        reply.error(Errno::ENOSYS);
    }

    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.fs.requests.count(Op::Other);
        reply.error(Errno::ENOSYS);
    }

    fn access(&self, _: &Request, _: INodeNo, _: fuser::AccessFlags, reply: ReplyEmpty) {
        self.fs.requests.count(Op::Other);
        reply.error(Errno::ENOSYS);
    }

    fn lseek(&self, _: &Request, _: INodeNo, _: FileHandle, _: i64, _: i32, reply: ReplyLseek) {
        self.fs.requests.count(Op::Other);
        reply.error(Errno::ENOSYS);
    }
}

fn send_xattr(value: Result<Vec<u8>, i32>, size: u32, reply: ReplyXattr) {
    match value {
        Err(e) => reply.error(errno(e)),
        Ok(v) if size == 0 => reply.size(u32::try_from(v.len()).unwrap_or(u32::MAX)),
        Ok(v) if v.len() > size as usize => reply.error(Errno::ERANGE),
        Ok(v) => reply.data(&v),
    }
}
