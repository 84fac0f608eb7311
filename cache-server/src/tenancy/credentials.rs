//! The credentials that the user of this server handed to it. In memory only: a restart forgets them.
//!
//! 1. Only a server that is one user's own takes credentials: no TCP listener (also none of the S3 door), no
//!    tokens, no other admins.
//! 2. Only that user and root may hand them over, and only over the socket, where the kernel names the user.
//! 3. While the server holds credentials, it answers no other user: nobody reads through another's rights.

use crate::app::config::Config;
use crate::tenancy::auth::Peer;
use fletch_api::{GivenCredentials, credentials::ORIGINS_MAX};
use fletch_origin::{GiveError, Given, OriginUri, Origins};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;

/// Why a caller may not hand over credentials, or see whose the server has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NotYours {
    /// The server may have several users.
    #[error(
        "this server takes no credentials from users, because it can have several (it has a TCP listener, \
         tokens or further admins), and nobody reads through another's credentials"
    )]
    ManyUsers,
    /// The connection does not show a user.
    #[error("credentials are handed over on the unix socket only, where the server sees the user")]
    NoUser,
    /// Another user than the server's.
    #[error("credentials are taken from the user that runs the server and from root; you are the user {0}")]
    OtherUser(u32),
}

impl NotYours {
    /// Returns what to do about it.
    #[must_use]
    pub fn hint(&self) -> &'static str {
        match self {
            NotYours::ManyUsers => {
                "here credentials come from an [[origin]] of the server's settings; or let `fletch mount` \
                 start a server of your own"
            }
            NotYours::NoUser => "use the unix socket of the server: --server unix:PATH",
            NotYours::OtherUser(_) => "let `fletch mount` start a server of your own",
        }
    }
}

/// The credentials of this server, without any secret. The origins have the secrets.
#[derive(Debug)]
pub struct HeldCredentials {
    /// Whether the server is one user's own.
    is_personal: bool,
    own_user: Option<u32>,
    held: Mutex<BTreeMap<OriginUri, GivenCredentials>>,
}

impl HeldCredentials {
    /// Returns the empty table of a server with this configuration, which the user `own_user` runs.
    #[must_use]
    pub fn new(config: &Config, own_user: Option<u32>) -> Self {
        HeldCredentials { is_personal: is_personal(config), own_user, held: Mutex::default() }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<OriginUri, GivenCredentials>> {
        self.held.lock()
    }

    /// Checks that a caller may hand over credentials and see whose the server has.
    ///
    /// # Errors
    /// [`NotYours`].
    pub fn check(&self, peer: Peer) -> Result<(), NotYours> {
        if !self.is_personal {
            return Err(NotYours::ManyUsers);
        }
        self.check_user(peer)
    }

    fn check_user(&self, peer: Peer) -> Result<(), NotYours> {
        match peer {
            Peer::Tcp => Err(NotYours::NoUser),
            Peer::Unix { uid: 0, .. } => Ok(()),
            Peer::Unix { uid, .. } if self.own_user == Some(uid) => Ok(()),
            Peer::Unix { uid, .. } => Err(NotYours::OtherUser(uid)),
        }
    }

    /// Checks that a caller may read: while the server holds credentials, no other user may.
    ///
    /// # Errors
    /// [`NotYours`].
    pub fn check_reader(&self, peer: Peer) -> Result<(), NotYours> {
        if !self.is_personal || self.lock().is_empty() { Ok(()) } else { self.check_user(peer) }
    }

    /// Uses credentials from now on, in place of older ones of the same origin. Returns what is shown of
    /// them.
    ///
    /// # Errors
    /// [`GiveError`]; older credentials then stay in use.
    pub fn give(
        &self,
        origins: &Origins,
        given: Given,
        (given_ns, expires_ns): (u64, Option<u64>),
    ) -> Result<GivenCredentials, GiveError> {
        let uri = given.uri().clone();
        let shown = GivenCredentials {
            origin: uri.to_string(),
            identity: given.identity().to_owned(),
            given_ns,
            expires_ns,
        };
        // Locked meanwhile, so that the table shows the credentials that are in use.
        let mut held = self.lock();
        origins.give(given, ORIGINS_MAX)?;
        held.insert(uri, shown.clone());
        Ok(shown)
    }

    /// Returns what is shown of all credentials, in the order of their origins.
    #[must_use]
    pub fn list(&self) -> Vec<GivenCredentials> {
        self.lock().values().cloned().collect()
    }
}

/// Returns whether a server with this configuration is one user's own.
#[must_use]
pub fn is_personal(config: &Config) -> bool {
    let has_port = config.listen.is_some() || config.s3.is_some();
    !has_port && config.auth_tokens.is_none() && config.socket_admins.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::app::config::{self, Action, Environment};
    use crate::tenancy::auth::UNKNOWN_UID;

    #[test]
    fn a_server_with_a_port_is_not_one_users_own() {
        let own = |more: &[&str]| {
            let args = [&["fletch-server", "--listen", "none"], more].concat();
            let environment = Environment { home: Some("/home/u".into()), ..Environment::default() };
            match config::read(args, &environment) {
                Ok(Action::Serve(config)) => is_personal(&config),
                other => panic!("{other:?}"),
            }
        };
        assert!(own(&[]));
        assert!(!own(&["--s3-listen", "127.0.0.1:0"]), "every local user reaches the S3 door");
    }

    fn held(is_personal: bool, own_user: Option<u32>) -> HeldCredentials {
        HeldCredentials { is_personal, own_user, held: Mutex::default() }
    }

    fn user(uid: u32) -> Peer {
        Peer::Unix { uid, gid: 1000 }
    }

    fn give(held: &HeldCredentials, origins: &Origins, uri: &str) -> Result<GivenCredentials, GiveError> {
        let config = fletch_origin::OriginConfig { prefix: uri.to_owned(), ..Default::default() };
        let secrets = [("aws_access_key_id", "AKIAIOSFODNN7EXAMPLE"), ("aws_secret_access_key", "hunter2")];
        let secrets = secrets.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        held.give(origins, Given::new(config, secrets, None).expect("right"), (7, None))
    }

    #[test]
    fn the_user_of_the_server_and_root_hand_over_credentials() {
        let own = held(true, Some(1000));
        assert_eq!((own.check(user(1000)), own.check(user(0))), (Ok(()), Ok(())));
        assert_eq!(own.check(user(1001)), Err(NotYours::OtherUser(1001)));
        assert_eq!(own.check(Peer::Tcp), Err(NotYours::NoUser));
        let nobody = held(true, None);
        assert_eq!(nobody.check(user(UNKNOWN_UID)), Err(NotYours::OtherUser(UNKNOWN_UID)), "many look so");
        let many = held(false, Some(1000));
        for peer in [user(1000), user(0), user(1001), Peer::Tcp] {
            assert_eq!(many.check(peer), Err(NotYours::ManyUsers), "{peer:?}");
            assert_eq!(many.check_reader(peer), Ok(()), "{peer:?}");
        }
    }

    #[test]
    fn nobody_else_reads_while_the_server_holds_credentials() {
        let (own, origins) =
            (held(true, Some(1000)), Origins::new(Vec::new(), Default::default()).expect("none"));
        assert_eq!(own.check_reader(user(1001)), Ok(()));
        give(&own, &origins, "s3://bkt").expect("given");
        assert_eq!(own.check_reader(user(1001)), Err(NotYours::OtherUser(1001)));
        assert_eq!((own.check_reader(user(1000)), own.check_reader(user(0))), (Ok(()), Ok(())));
    }

    #[test]
    fn credentials_are_replaced_and_bounded() {
        let (own, origins) =
            (held(true, Some(1000)), Origins::new(Vec::new(), Default::default()).expect("none"));
        for i in 0..ORIGINS_MAX {
            give(&own, &origins, &format!("s3://bucket-{i}")).expect("given");
        }
        give(&own, &origins, "s3://bucket-0").expect("replaced");
        assert_eq!(give(&own, &origins, "s3://more"), Err(GiveError::TooMany(ORIGINS_MAX)));
        assert_eq!(own.list().len(), ORIGINS_MAX);
        assert!(!format!("{own:?} {origins:?}").contains("hunter2"));
    }
}
