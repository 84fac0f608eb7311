//! `bare-mount DIR FILES BYTES [BACKING]`
//!
//! The smallest possible daemon of the `samples` mode, with which Fletch's mount is compared. It serves
//! without open and opendir, with readdirplus, day-long TTLs and kept pages. The tree is computed, and every
//! file is a window of one buffer in memory.
//!
//! With BACKING, a file of BYTES, the kernel reads that file instead of asking the daemon (passthrough, Linux
//! 6.9). Then each open is a request.

use fuser::{
    BackingId, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo,
    InitFlags, KernelConfig, LockOwner, MountOption, OpenFlags, ReplyAttr, ReplyData, ReplyDirectory,
    ReplyDirectoryPlus, ReplyEntry, ReplyOpen, Request, SessionACL,
};
use rand::{RngCore, SeedableRng};
use std::ffi::OsStr;
use std::fs::File;
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

const TTL: Duration = Duration::from_secs(86_400);
const PER_DIR: u64 = 1000;
const DIRS_FROM: u64 = 1 << 32;

struct Bare {
    files: u64,
    bytes: u64,
    window: Vec<u8>,
    backing: Option<File>,
    /// The backing file, as the kernel knows it since the first open.
    registered: Mutex<Option<BackingId>>,
}

impl Bare {
    fn attr(&self, ino: u64) -> FileAttr {
        let dir = ino == 1 || ino >= DIRS_FROM;
        let size = if dir { 0 } else { self.bytes };
        FileAttr {
            ino: INodeNo(ino),
            size,
            blocks: size.div_ceil(512),
            atime: SystemTime::UNIX_EPOCH,
            mtime: SystemTime::UNIX_EPOCH,
            ctime: SystemTime::UNIX_EPOCH,
            crtime: SystemTime::UNIX_EPOCH,
            kind: if dir { FileType::Directory } else { FileType::RegularFile },
            perm: if dir { 0o555 } else { 0o444 },
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        }
    }

    /// The children of a directory from the `from`-th on: (inode, name).
    fn children(&self, ino: u64, from: u64) -> Box<dyn Iterator<Item = (u64, String)>> {
        if ino == 1 {
            return Box::new(
                (from..self.files.div_ceil(PER_DIR)).map(|d| (DIRS_FROM + d, format!("d{d:02}"))),
            );
        }
        let first = (ino - DIRS_FROM) * PER_DIR;
        let end = self.files.min(first + PER_DIR);
        Box::new((first + from..end).map(|i| (i + 2, format!("f{i:05}.jpg"))))
    }
}

impl Filesystem for Bare {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let open = if self.backing.is_some() {
            config.set_max_stack_depth(1).map_err(|_| std::io::Error::other("no stacked file systems"))?;
            InitFlags::FUSE_PASSTHROUGH
        } else {
            InitFlags::FUSE_NO_OPEN_SUPPORT
        };
        let want = open
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_READDIRPLUS_AUTO
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_ASYNC_READ
            | InitFlags::FUSE_CACHE_SYMLINKS;
        config.add_capabilities(want).map_err(|_| std::io::Error::other("kernel lacks a capability"))
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let name = name.to_string_lossy();
        match self.children(parent.0, 0).find(|(_, n)| *n == name) {
            Some((ino, _)) => reply.entry(&TTL, &self.attr(ino), Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &self.attr(ino.0));
    }

    fn open(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        let Some(file) = &self.backing else { return reply.error(Errno::ENOSYS) };
        let mut registered = self.registered.lock().expect("no thread panics");
        if registered.is_none() {
            match reply.open_backing(file) {
                Ok(id) => *registered = Some(id),
                Err(error) => return reply.error(error.into()),
            }
        }
        if let Some(id) = registered.as_ref() {
            reply.opened_passthrough(FileHandle(0), FopenFlags::empty(), id);
        }
    }

    fn opendir(&self, _req: &Request, _ino: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        reply.error(Errno::ENOSYS);
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock: Option<LockOwner>,
        reply: ReplyData,
    ) {
        let end = self.bytes.min(offset + u64::from(size));
        let len = usize::try_from(end.saturating_sub(offset)).unwrap_or(0);
        // Windows 4 KiB apart, so that neighbours do not share cache lines only. A long file repeats the
        // buffer.
        let room = (self.window.len() - len) as u64;
        let at = usize::try_from((ino.0 * 4096 + offset) % room).unwrap_or(0);
        reply.data(&self.window[at..at + len]);
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        for (i, (child, name)) in self.children(ino.0, offset).enumerate() {
            let kind = if child >= DIRS_FROM { FileType::Directory } else { FileType::RegularFile };
            if reply.add(INodeNo(child), offset + i as u64 + 1, kind, name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        for (i, (child, name)) in self.children(ino.0, offset).enumerate() {
            let next = offset + i as u64 + 1;
            if reply.add(INodeNo(child), next, name, &TTL, &self.attr(child), Generation(0)) {
                break;
            }
        }
        reply.ok();
    }
}

fn main() -> std::io::Result<()> {
    let args: Vec<String> = std::env::args().collect();
    let number = |i: usize| args.get(i).and_then(|a| a.parse().ok()).unwrap_or(0);
    let (files, bytes) = (number(2), number(3));
    let is_usage = matches!(args.len(), 4 | 5) && files > 0 && bytes > 0;
    assert!(is_usage, "usage: bare-mount DIR FILES BYTES [BACKING]");
    let backing = args.get(4).map(File::open).transpose()?;
    let mut window = vec![0; 16 << 20];
    rand_chacha::ChaCha8Rng::seed_from_u64(1).fill_bytes(&mut window);
    let mut config = Config::default();
    config.mount_options = vec![MountOption::RO, MountOption::FSName("bare".into())];
    config.acl = SessionACL::Owner;
    config.n_threads = Some(2);
    config.clone_fd = true;
    fuser::mount(Bare { files, bytes, window, backing, registered: Mutex::default() }, &args[1], &config)
}
