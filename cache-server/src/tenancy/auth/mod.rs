//! Authentication: maps the token of a request to a [`Principal`]. Without tokens, the connection decides.
//!
//! Owns the tokens file: [`tokens_file`] reads it, [`new_token`] makes tokens for it, and [`Auth`] reloads it
//! when it changes. [`peer`] gives each peer of a server without tokens its role. [`s3_keys`] derives
//! credentials of S3 clients from tokens.
//!
//! Invariants:
//! 1. A token is hashed at once and then dropped. Nothing here keeps, logs or shows a token.
//! 2. A missing token and an unknown one are the same error ([`Unauthenticated`]), so that they get the same
//!    reply.
//! 3. A tokens file with a fault changes nothing: the previous tokens stay in force. The fault is logged once
//!    for each state of the file.

mod new_token;
mod peer;
mod s3_keys;
mod tokens_file;

pub use fletch_api::hosts::AllowedHosts;
pub use new_token::{Minted, NewToken, command};
#[cfg(test)]
pub use peer::UNKNOWN_UID;
pub use peer::{Peer, SocketAdmins};
pub use s3_keys::{AccessId, S3KeyError, S3Keys, S3Secret};
pub use tokens_file::{Quota, Role, TokensError};

use fletch_core::{Domain, Hash, Tenant};
use fletch_host::files::FileStamp;
use parking_lot::{Mutex, RwLock};
use std::{
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{Acquire, Relaxed, Release},
        },
    },
};
use tokens_file::{Tokens, prefix_of};

/// The identity of a caller.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Principal {
    /// The domain whose bytes the caller shares.
    pub domain: Domain,
    /// The tenant that owns the caller's jobs and quota.
    pub tenant: Tenant,
    /// What the caller may do.
    pub role: Role,
}

impl Principal {
    /// Returns the principal with this role of a server without a tokens file.
    #[must_use]
    pub fn anonymous(role: Role) -> Self {
        Principal { domain: Domain::default_domain(), tenant: Tenant::default_tenant(), role }
    }
}

/// The request has no token, or an unknown one. The error never says which (invariant 2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the request has no token that this server knows")]
pub struct Unauthenticated;

/// What authentication counted since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AuthStats {
    /// Tokens in force.
    pub tokens: u64,
    /// Requests without a known token.
    pub refused: u64,
    /// Changed tokens files that came into force.
    pub reloads: u64,
    /// Changed tokens files with a fault.
    pub reload_errors: u64,
}

/// The authentication of a server.
#[derive(Debug)]
pub struct Auth {
    /// `None`: every caller is [`Principal::anonymous`].
    file: Option<WatchedFile>,
    /// The admins of the unix socket of a server without tokens.
    socket_admins: SocketAdmins,
    /// The user of this process.
    own_user: Option<u32>,
    refused: AtomicU64,
    reloads: AtomicU64,
    reload_errors: AtomicU64,
}

#[derive(Debug)]
struct WatchedFile {
    path: PathBuf,
    tokens: RwLock<Arc<Tokens>>,
    /// The state of the file at the last check. `None` if the file could not be read.
    last_stamp: Mutex<Option<FileStamp>>,
}

impl Auth {
    /// Reads the tokens file, if a path is given. Blocking.
    ///
    /// # Errors
    /// [`TokensError`] with every fault of the file.
    pub fn open(path: Option<&Path>, socket_admins: SocketAdmins) -> Result<Self, TokensError> {
        let watched = |path: &Path| {
            // Stamped before it is read, so that the next check notices a change in between.
            let last_stamp = Mutex::new(FileStamp::at(path).ok());
            let tokens = RwLock::new(Arc::new(Tokens::load(path)?));
            Ok::<_, TokensError>(WatchedFile { path: path.to_owned(), tokens, last_stamp })
        };
        Ok(Auth {
            file: path.map(watched).transpose()?,
            socket_admins,
            own_user: peer::own_user(),
            refused: AtomicU64::new(0),
            reloads: AtomicU64::new(0),
            reload_errors: AtomicU64::new(0),
        })
    }

    fn tokens(&self) -> Option<Arc<Tokens>> {
        let file = self.file.as_ref()?;
        Some(Arc::clone(&file.tokens.read()))
    }

    /// Whether a peer that the kernel shows as this user is the user of this process.
    #[must_use]
    pub fn is_own_user(&self, uid: u32) -> bool {
        self.own_user == Some(uid)
    }

    /// Returns whether a request needs a token.
    #[must_use]
    pub fn needs_token(&self) -> bool {
        self.file.is_some()
    }

    /// Returns the principal of a request, by the bytes of its `Authorization` header. Without tokens, `peer`
    /// decides.
    ///
    /// # Errors
    /// [`Unauthenticated`].
    pub fn authenticate(&self, header: Option<&[u8]>, peer: Peer) -> Result<Principal, Unauthenticated> {
        let Some(tokens) = self.tokens() else {
            return Ok(Principal::anonymous(self.socket_admins.role_of(peer, self.own_user)));
        };
        // A missing token is looked up as the empty token, which no file can have. So both take the same
        // time.
        let token = header.and_then(bearer).unwrap_or_default();
        tokens.find(token).ok_or_else(|| {
            self.refused.fetch_add(1, Relaxed);
            Unauthenticated
        })
    }

    /// Returns the principal of a request, and what its token's hash begins with.
    ///
    /// # Errors
    /// [`Unauthenticated`], also on a server without tokens.
    pub fn token_prefix(&self, header: Option<&[u8]>) -> Result<(u64, Principal), Unauthenticated> {
        let principal = self.authenticate(header, Peer::Tcp)?;
        let token = header.and_then(bearer).filter(|_| self.needs_token()).ok_or(Unauthenticated)?;
        Ok((prefix_of(&Hash::of(token)), principal))
    }

    /// Returns the principal of the one token in force whose hash begins with these eight bytes.
    #[must_use]
    pub fn of_prefix(&self, prefix: u64) -> Option<Principal> {
        self.tokens()?.of_prefix(prefix)
    }

    /// Counts a request whose credentials, other than a bearer token, are refused.
    pub fn count_refused(&self) {
        self.refused.fetch_add(1, Relaxed);
    }

    /// Returns a number that grows when other tokens have come into force.
    #[must_use]
    pub fn tokens_number(&self) -> u64 {
        self.reloads.load(Acquire)
    }

    /// Returns the user that runs this process.
    #[must_use]
    pub fn own_user(&self) -> Option<u32> {
        self.own_user
    }

    /// Whether a request needs a token.
    #[must_use]
    pub fn is_required(&self) -> bool {
        self.file.is_some()
    }

    /// Returns the quota of a tenant.
    #[must_use]
    pub fn quota(&self, tenant: &Tenant) -> Quota {
        self.tokens().map_or_else(Quota::default, |t| t.quota(tenant))
    }

    /// Returns every tenant with its quota. Without a tokens file, that is the tenant of every caller.
    #[must_use]
    pub fn tenants(&self) -> Vec<(Tenant, Quota)> {
        let anonymous = || vec![(Tenant::default_tenant(), Quota::default())];
        self.tokens().map_or_else(anonymous, |t| t.tenants())
    }

    /// Returns every tenant that has a quota.
    #[must_use]
    pub fn quotas(&self) -> Vec<(Tenant, Quota)> {
        self.tokens().map_or_else(Vec::new, |t| t.quotas())
    }

    /// Reloads the tokens file if it changed. Returns whether other tokens are now in force. Blocking.
    ///
    /// A second call while one runs does nothing.
    pub fn reload(&self) -> bool {
        let Some(file) = &self.file else { return false };
        let Some(mut seen) = file.last_stamp.try_lock() else { return false };
        let stamp = FileStamp::at(&file.path).ok();
        if stamp == *seen {
            return false;
        }
        *seen = stamp;
        match Tokens::load(&file.path) {
            Ok(tokens) => {
                tracing::info!(
                    file = %file.path.display(), tokens = tokens.len(),
                    "the changed tokens file is in force"
                );
                *file.tokens.write() = Arc::new(tokens);
                self.reloads.fetch_add(1, Release);
                true
            }
            Err(error) => {
                self.reload_errors.fetch_add(1, Relaxed);
                tracing::error!(
                    %error,
                    "the changed tokens file has a fault; the previous tokens stay in force"
                );
                false
            }
        }
    }

    /// Returns a hash of the tokens in force, or `None` without a tokens file. Equal tokens have equal hashes
    /// at all servers.
    #[must_use]
    pub fn fingerprint(&self) -> Option<Hash> {
        self.tokens().map(|tokens| tokens.fingerprint())
    }

    /// Returns what was counted.
    #[must_use]
    pub fn stats(&self) -> AuthStats {
        AuthStats {
            tokens: self.tokens().map_or(0, |t| t.len() as u64),
            refused: self.refused.load(Relaxed),
            reloads: self.reloads.load(Relaxed),
            reload_errors: self.reload_errors.load(Relaxed),
        }
    }
}

/// Returns the token of an `Authorization: Bearer …` header.
fn bearer(header: &[u8]) -> Option<&[u8]> {
    let (scheme, token) = header.split_at_checked(7)?;
    scheme.eq_ignore_ascii_case(b"Bearer ").then(|| token.trim_ascii())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ROOT: Peer = Peer::Unix { uid: 0, gid: 0 };

    fn line(token: &str, rest: &str) -> String {
        format!("[[token]]\nhash = \"{}\"\n{rest}\n", Hash::of(token.as_bytes()))
    }

    #[test]
    fn a_token_is_a_principal_and_nothing_else_is_anything() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("tokens.toml");
        std::fs::write(
            &path,
            line("sesame", "tenant = \"a\"")
                + &line("two", "tenant = \"b\"\ndomain = \"d\"\nrole = \"reader\""),
        )
        .expect("write");
        let auth = Auth::open(Some(&path), SocketAdmins::default()).expect("readable");
        let a = auth.authenticate(Some(b"Bearer sesame"), Peer::Tcp).expect("known");
        assert_eq!((a.domain.as_str(), a.tenant.as_str(), a.role), ("a", "a", Role::User));
        let b = auth.authenticate(Some(b"bearer  two "), ROOT).expect("known");
        assert_eq!((b.domain.as_str(), b.tenant.as_str(), b.role), ("d", "b", Role::Reader));
        let none: [Option<&[u8]>; 7] = [
            None,
            Some(b""),
            Some(b"Bearer "),
            Some(b"Bearer sesam"),
            Some(b"Bearer sesamex"),
            Some(b"Basic sesame"),
            Some(b"sesame"),
        ];
        for header in none {
            for peer in [Peer::Tcp, ROOT] {
                assert_eq!(auth.authenticate(header, peer), Err(Unauthenticated), "{header:?}");
            }
        }
        assert_eq!(auth.stats().refused, 14);
        let open = Auth::open(None, SocketAdmins::default()).expect("none");
        let other = Peer::Unix { uid: nix::unistd::geteuid().as_raw() + 1, gid: 7 };
        for (peer, role) in [(Peer::Tcp, Role::Admin), (ROOT, Role::Admin), (other, Role::Reader)] {
            assert_eq!(open.authenticate(None, peer), Ok(Principal::anonymous(role)), "{peer:?}");
        }
        assert!(!format!("{auth:?}").contains("sesame"), "nothing shows a token");
        let hash = auth.fingerprint().expect("a tokens file");
        let (one, two) = (line("sesame", "tenant = \"a\""), line("two", "tenant = \"b\"\nrole = \"reader\""));
        std::fs::write(&path, two.clone() + &one).expect("write");
        auth.reload();
        let other = auth.fingerprint().expect("a tokens file");
        assert_ne!(hash, other, "another domain");
        std::fs::write(&path, one + "\n" + &two).expect("write");
        auth.reload();
        assert_eq!(auth.fingerprint(), Some(other), "the order of the file means nothing");
    }

    #[test]
    fn a_rotated_file_comes_into_force_and_a_broken_one_does_not() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("tokens.toml");
        let put = |text: &str| {
            let part = dir.path().join("part");
            std::fs::write(&part, text).expect("write");
            std::fs::rename(&part, &path).expect("rename");
        };
        put(&line("one", "tenant = \"a\""));
        let auth = Auth::open(Some(&path), SocketAdmins::default()).expect("readable");
        let knows =
            |token: &str| auth.authenticate(Some(format!("Bearer {token}").as_bytes()), Peer::Tcp).is_ok();
        assert!(!auth.reload(), "nothing changed");
        put(&line("two", "tenant = \"a\""));
        auth.reload();
        assert!(knows("two") && !knows("one"));
        for broken in ["", "[[token]]\n", "not toml", &line("three", "tenant = \"a b\"")] {
            put(broken);
            auth.reload();
            auth.reload();
            assert!(knows("two") && !knows("three"), "{broken:?}");
        }
        assert_eq!(auth.stats().reload_errors, 4, "each state of the file is told once");
        std::fs::remove_file(&path).expect("remove");
        auth.reload();
        assert!(knows("two"));
        put(&line("four", "tenant = \"a\""));
        auth.reload();
        assert!(knows("four") && !knows("two"));
        assert!(
            Auth::open(Some(&dir.path().join("absent")), SocketAdmins::default()).is_err(),
            "a start needs a file"
        );
    }
}
