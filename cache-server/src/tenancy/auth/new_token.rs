//! `fletch-server token new`: makes a random token, and the lines for the tokens file.

use super::Role;
use clap::{Arg, ArgAction, ArgMatches, Command, value_parser};
use fletch_core::{Domain, Hash, Tenant};
use rand::TryRngCore as _;
use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::{Path, PathBuf},
};

/// The random bytes of a token. Guessing them is as hard as breaking the token's hash.
const RANDOM_BYTES: usize = 32;

/// The settings of a token that is to be made.
#[derive(Debug, Clone)]
pub struct NewToken {
    /// `None` for a peer.
    tenant: Option<Tenant>,
    domain: Option<Domain>,
    role: Role,
    note: Option<String>,
    append: Option<PathBuf>,
    out: Option<PathBuf>,
    force: bool,
}

/// A token that was made. `Debug` does not show it.
pub struct Minted {
    /// The token, which the client sends. It is stored nowhere else.
    pub token: String,
    /// The lines for the tokens file, as TOML.
    pub lines: String,
    /// The file to which the lines were appended.
    pub appended: Option<PathBuf>,
    /// The file that has the token.
    pub out: Option<PathBuf>,
}

impl std::fmt::Debug for Minted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Minted").field("lines", &self.lines).finish_non_exhaustive()
    }
}

/// Returns the `token` subcommand.
pub fn command() -> Command {
    let arg = |name: &'static str, value: &'static str, help: &'static str| {
        Arg::new(name).long(name).value_name(value).help(help)
    };
    Command::new("token").about("Makes tokens for authentication").subcommand_required(true).subcommand(
        Command::new("new")
            .about("Makes a token and the lines for the tokens file. Prints both, or writes them to files")
            .after_help(
                "Give the token a file with --out. A shell makes the file of `token new > FILE` before the \
                    server runs, so that every user of the machine can read it.",
            )
            .arg(
                arg("tenant", "TENANT", "Tenant that owns the token's jobs, registrations and quota")
                    .required_unless_present("role")
                    .value_parser(value_parser!(Tenant)),
            )
            .arg(
                arg(
                    "domain",
                    "DOMAIN",
                    "Domain with which the tenant shares bytes [default: the tenant alone]",
                )
                .value_parser(value_parser!(Domain)),
            )
            .arg(
                arg("role", "ROLE", "Role: reader, user, admin, monitor or peer (no tenant) [default: user]")
                    .value_parser(value_parser!(Role)),
            )
            .arg(arg("note", "TEXT", "Note for people, such as where the token is used"))
            .arg(
                arg("append", "FILE", "Append the lines to this tokens file")
                    .value_parser(value_parser!(PathBuf)),
            )
            .arg(
                arg("out", "FILE", "Write the token to this new file (mode 0600) instead of stdout")
                    .value_parser(value_parser!(PathBuf)),
            )
            .arg(
                Arg::new("force")
                    .long("force")
                    .action(ArgAction::SetTrue)
                    .requires("out")
                    .help("Replace the file of --out if it exists"),
            ),
    )
}

impl NewToken {
    /// Reads the arguments of [`command`].
    #[must_use]
    pub fn read(matches: &ArgMatches) -> Self {
        let m = matches.subcommand().map_or(matches, |(_, m)| m);
        NewToken {
            tenant: m.get_one("tenant").cloned(),
            domain: m.get_one("domain").cloned(),
            role: m.get_one("role").copied().unwrap_or_default(),
            note: m.get_one("note").cloned(),
            append: m.get_one("append").cloned(),
            out: m.get_one("out").cloned(),
            force: m.get_flag("force"),
        }
    }

    /// Makes the token, writes it to its file, and appends its lines to the tokens file, if files are given.
    ///
    /// # Errors
    /// If a peer has a tenant, or another role has none; if the system gives no random bytes, a file cannot
    /// be written, or the token's file exists.
    pub fn mint(&self) -> io::Result<Minted> {
        self.check().map_err(|why| io::Error::new(io::ErrorKind::InvalidInput, why))?;
        // Before the lines are appended, so that no token comes into force that nobody has.
        let out = self.out.as_deref().map(|path| self.create(path)).transpose()?;
        let minted = self.mint_to(out);
        if let (Err(_), Some(path)) = (&minted, &self.out) {
            std::fs::remove_file(path)?;
        }
        minted
    }

    fn check(&self) -> Result<(), &'static str> {
        match (self.role.may_ask_as_peer(), &self.tenant, &self.domain) {
            (true, None, None) | (false, Some(_), _) => Ok(()),
            (true, ..) => Err("a peer has no tenant and no domain: leave out --tenant and --domain"),
            (false, None, _) => Err("the role needs a tenant: give --tenant"),
        }
    }

    /// Creates the token's file, which only its owner may read.
    fn create(&self, path: &Path) -> io::Result<File> {
        let failed = |e: io::Error| {
            let hint = match e.kind() {
                io::ErrorKind::AlreadyExists => "; give another file, or replace it with --force",
                _ => "",
            };
            io::Error::new(e.kind(), format!("{}: {e}{hint}", path.display()))
        };
        if self.force {
            match std::fs::remove_file(path) {
                Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(failed(e)),
                _ => {}
            }
        }
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed)
    }

    fn mint_to(&self, out: Option<File>) -> io::Result<Minted> {
        let mut random = [0; RANDOM_BYTES];
        rand::rngs::OsRng.try_fill_bytes(&mut random).map_err(io::Error::other)?;
        let token = format!("fletch_{}", hex::encode(random));
        let mut lines = format!("\n[[token]]\nhash = \"{}\"\n", Hash::of(token.as_bytes()));
        if let Some(tenant) = &self.tenant {
            lines += &format!("tenant = \"{tenant}\"\n");
        }
        lines += &format!("role = \"{}\"\n", self.role);
        if let Some(domain) = &self.domain {
            lines += &format!("domain = \"{domain}\"\n");
        }
        if let Some(note) = &self.note {
            lines += &format!("note = {}\n", toml::Value::from(note.as_str()));
        }
        if let Some(mut out) = out {
            out.write_all(format!("{token}\n").as_bytes()).and_then(|()| out.sync_all())?;
        }
        if let Some(file) = &self.append {
            let failed = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", file.display()));
            let mut file =
                OpenOptions::new().append(true).create(true).mode(0o600).open(file).map_err(failed)?;
            // One write, so that a server that reads the file meanwhile sees all lines or none.
            file.write_all(lines.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        Ok(Minted { token, lines, appended: self.append.clone(), out: self.out.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenancy::auth::{Auth, Peer, SocketAdmins};
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn what_is_made_is_known_to_a_server() {
        let dir = tempfile::tempdir().expect("tempdir");
        let path = dir.path().join("tokens.toml");
        let make = |args: &[&str]| {
            let usual = ["token", "new", "--append", path.to_str().expect("utf-8")];
            let matches = command().try_get_matches_from(usual.iter().chain(args)).expect("usable");
            NewToken::read(&matches).mint().expect("made")
        };
        let a = make(&["--tenant", "a"]);
        let b = make(&["--tenant", "b", "--domain", "d", "--role", "admin", "--note", "a \"b\"\n]"]);
        let peer = make(&["--role", "peer"]);
        assert_ne!(a.token, b.token);
        let auth = Auth::open(Some(&path), SocketAdmins::default()).expect("holds together");
        let ask = |m: &Minted| {
            let header = format!("Bearer {}", m.token);
            auth.authenticate(Some(header.as_bytes()), Peer::Tcp).expect("known")
        };
        assert_eq!((ask(&a).tenant.as_str(), ask(&a).role), ("a", Role::User));
        assert_eq!((ask(&b).domain.as_str(), ask(&b).role), ("d", Role::Admin));
        assert_eq!(ask(&peer).role, Role::Peer);
        for wrong in [&["--role", "admin"][..], &["--role", "peer", "--tenant", "t"]] {
            let matches =
                command().try_get_matches_from(["token", "new"].iter().chain(wrong)).expect("usable");
            assert!(NewToken::read(&matches).mint().is_err(), "{wrong:?}");
        }
        let file = std::fs::read_to_string(&path).expect("file");
        assert!(!file.contains(&a.token) && !format!("{a:?}").contains(&a.token));
        assert!(command().try_get_matches_from(["token", "new"]).is_err());
    }

    #[test]
    fn a_token_gets_a_private_file_and_replaces_none_unasked() {
        let dir = tempfile::tempdir().expect("tempdir");
        let at = |name: &str| dir.path().join(name).display().to_string();
        let mint = |args: &[&str]| {
            let args = ["token", "new", "--tenant", "t"].iter().chain(args);
            NewToken::read(&command().try_get_matches_from(args).expect("usable")).mint()
        };
        let made = mint(&["--out", &at("token"), "--append", &at("tokens.toml")]).expect("made");
        let text = || std::fs::read_to_string(at("token")).expect("token");
        assert_eq!(text(), format!("{}\n", made.token));
        for file in ["token", "tokens.toml"] {
            let mode = std::fs::metadata(at(file)).expect("file").permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{file}");
        }
        let told = mint(&["--out", &at("token"), "--append", &at("tokens.toml")]).expect_err("exists");
        assert!(told.to_string().contains("--force"), "{told}");
        assert_eq!(text(), format!("{}\n", made.token), "the file is as it was");
        let tokens = std::fs::read_to_string(at("tokens.toml")).expect("tokens");
        assert_eq!(tokens.matches("[[token]]").count(), 1, "and no line was appended");
        std::fs::set_permissions(at("token"), std::fs::Permissions::from_mode(0o644)).expect("chmod");
        let again = mint(&["--out", &at("token"), "--force"]).expect("replaced");
        assert_eq!(text(), format!("{}\n", again.token));
        assert_eq!(std::fs::metadata(at("token")).expect("file").permissions().mode() & 0o777, 0o600);
        assert!(mint(&["--out", &at("t2"), "--append", &at("no/dir")]).is_err());
        assert!(!std::fs::exists(at("t2")).expect("looked"), "a token that is in no file is not kept");
    }
}
