//! The other end of a connection, and its role on a server without tokens.

use super::Role;
use std::{fmt, str::FromStr};

/// The uid that the kernel shows for a user that this process's user namespace does not know.
pub const UNKNOWN_UID: u32 = 65_534;

/// Returns the user of this process, if peers that the kernel shows as this user are this user.
///
/// As [`UNKNOWN_UID`] the kernel also shows every user that this process's user namespace does not map. So a
/// server of that user, as containers run it, knows its user only where the namespace maps all users.
#[must_use]
pub fn own_user() -> Option<u32> {
    let map = std::fs::read_to_string("/proc/self/uid_map").unwrap_or_default();
    known_user(nix::unistd::geteuid().as_raw(), &map)
}

/// `map` is `/proc/self/uid_map`: lines of the first user inside, the first one outside, and their number.
fn known_user(uid: u32, map: &str) -> Option<u32> {
    let mapped = map.lines().filter_map(|line| line.split_whitespace().nth(2)?.parse::<u64>().ok());
    let maps_all = mapped.sum::<u64>() >= u64::from(u32::MAX);
    (uid != UNKNOWN_UID || maps_all).then_some(uid)
}

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

    /// Returns the role of a peer of a server without tokens that runs as the user `own` ([`own_user`]).
    ///
    /// A TCP connection shows no user, so every process that can open one is an admin. On the socket the
    /// server's own user, root and the named users and groups are admins; others only read.
    #[must_use]
    pub fn role_of(&self, peer: Peer, own: Option<u32>) -> Role {
        let Peer::Unix { uid, gid } = peer else { return Role::Admin };
        let named = self.0.iter().any(|id| match *id {
            LocalId::User(n) => n == uid,
            LocalId::Group(n) => n == gid,
        });
        if named || uid == 0 || own == Some(uid) { Role::Admin } else { Role::Reader }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_own_user_root_and_the_named_are_admins_of_the_socket() {
        let role = |named: &str, uid, gid| {
            named.parse::<SocketAdmins>().expect(named).role_of(Peer::Unix { uid, gid }, Some(1000))
        };
        assert_eq!((role("", 1000, 5), role("", 0, 5)), (Role::Admin, Role::Admin));
        assert_eq!((role("", 1001, 1000), role("", 65_534, 0)), (Role::Reader, Role::Reader));
        assert_eq!((role("1001", 1001, 5), role("1001", 5, 1001)), (Role::Admin, Role::Reader));
        assert_eq!((role("7,@27", 8, 27), role("7,@27", 27, 8)), (Role::Admin, Role::Reader));
        let nobody = Peer::Unix { uid: UNKNOWN_UID, gid: 5 };
        assert_eq!(SocketAdmins::default().role_of(nobody, None), Role::Reader, "many users look so");
        assert_eq!("65534".parse::<SocketAdmins>().expect("uid").role_of(nobody, Some(1)), Role::Admin);
        assert_eq!(SocketAdmins::default().role_of(Peer::Tcp, Some(1000)), Role::Admin);
        for bad in ["root", "-1", "@", "1 000", "4294967296"] {
            assert!(bad.parse::<SocketAdmins>().expect_err(bad).contains("@27"), "{bad}");
        }
        assert_eq!("7,@27".parse::<SocketAdmins>().expect("ids").to_string(), "7,@27");
    }
    #[test]
    fn nobody_knows_itself_where_all_users_are_mapped() {
        let host = "         0          0 4294967295\n";
        assert_eq!((known_user(1000, ""), known_user(1000, "0 1000 1\n")), (Some(1000), Some(1000)));
        assert_eq!(known_user(UNKNOWN_UID, host), Some(UNKNOWN_UID));
        let own = known_user(UNKNOWN_UID, host);
        let role = |own| SocketAdmins::default().role_of(Peer::Unix { uid: UNKNOWN_UID, gid: 5 }, own);
        assert_eq!(role(own), Role::Admin, "it started the server");
        for part in ["", "0 100000 65536\n", "65534 1000 1\n", "0 0 x\n"] {
            assert_eq!(role(known_user(UNKNOWN_UID, part)), Role::Reader, "{part:?}: many users look so");
        }
    }
}
