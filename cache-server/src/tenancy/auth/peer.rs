//! The other end of a connection, and its role on a server without tokens.

use super::Role;
use std::{fmt, str::FromStr};

/// The uid that the kernel shows for a user that this process's user namespace does not know.
pub const UNKNOWN_UID: u32 = 65_534;

/// The other end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A TCP connection.
    Tcp,
    /// A process that connected to the unix socket, as the kernel names its user.
    Unix {
        /// Its effective user.
        uid: u32,
        /// Its effective group.
        gid: u32,
    },
}

impl Peer {
    /// Returns whether a web browser can be at the other end.
    #[must_use]
    pub fn may_be_browser(self) -> bool {
        self == Peer::Tcp
    }
}

/// A user or a group of this machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LocalId {
    User(u32),
    Group(u32),
}

/// The users and groups that are admins on the unix socket of a server without tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SocketAdmins(Vec<LocalId>);

impl FromStr for SocketAdmins {
    type Err = String;

    /// Parses `1000,@27`: uids, and gids after an `@`, separated by commas.
    fn from_str(s: &str) -> Result<Self, String> {
        let id = |part: &str| {
            let number = part.strip_prefix('@').unwrap_or(part).parse::<u32>().map_err(|_| {
                format!(
                    "{part:?} is neither a uid nor a gid; write a number such as 1000, or @27 for a group"
                )
            })?;
            Ok(if part.starts_with('@') { LocalId::Group(number) } else { LocalId::User(number) })
        };
        s.split(',').filter(|p| !p.is_empty()).map(id).collect::<Result<_, String>>().map(SocketAdmins)
    }
}

impl fmt::Display for SocketAdmins {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = |id: &LocalId| match id {
            LocalId::User(n) => n.to_string(),
            LocalId::Group(n) => format!("@{n}"),
        };
        f.write_str(&self.0.iter().map(text).collect::<Vec<_>>().join(","))
    }
}

impl SocketAdmins {
    /// Returns whether none are named.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the role of a peer of a server without tokens that runs as the user `own`.
    ///
    /// A TCP connection shows no user, so every process that can open one is an admin. On the socket the
    /// server's own user, root and the named users and groups are admins; others only read.
    #[must_use]
    pub fn role_of(&self, peer: Peer, own: u32) -> Role {
        let Peer::Unix { uid, gid } = peer else { return Role::Admin };
        let named = self.0.iter().any(|id| match *id {
            LocalId::User(n) => n == uid,
            LocalId::Group(n) => n == gid,
        });
        if named || uid == 0 || (uid == own && uid != UNKNOWN_UID) { Role::Admin } else { Role::Reader }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_root_and_the_named_are_admins_of_the_socket() {
        let role = |named: &str, uid, gid| {
            named.parse::<SocketAdmins>().expect(named).role_of(Peer::Unix { uid, gid }, 1000)
        };
        assert_eq!((role("", 1000, 5), role("", 0, 5)), (Role::Admin, Role::Admin));
        assert_eq!((role("", 1001, 1000), role("", 65_534, 0)), (Role::Reader, Role::Reader));
        assert_eq!((role("1001", 1001, 5), role("1001", 5, 1001)), (Role::Admin, Role::Reader));
        assert_eq!((role("7,@27", 8, 27), role("7,@27", 27, 8)), (Role::Admin, Role::Reader));
        let nobody = Peer::Unix { uid: UNKNOWN_UID, gid: 5 };
        assert_eq!(SocketAdmins::default().role_of(nobody, UNKNOWN_UID), Role::Reader, "many users look so");
        assert_eq!("65534".parse::<SocketAdmins>().expect("uid").role_of(nobody, 1), Role::Admin);
        assert_eq!(SocketAdmins::default().role_of(Peer::Tcp, 1000), Role::Admin);
        for bad in ["root", "-1", "@", "1 000", "4294967296"] {
            assert!(bad.parse::<SocketAdmins>().expect_err(bad).contains("@27"), "{bad}");
        }
        assert_eq!("7,@27".parse::<SocketAdmins>().expect("ids").to_string(), "7,@27");
    }
}
