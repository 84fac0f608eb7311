//! `fletch-server token new`: makes a random token, and the lines for the tokens file.

use super::Role;
use clap::{Arg, ArgMatches, Command, value_parser};
use fletch_core::{Domain, Hash, Tenant};
use rand::TryRngCore as _;
use std::{
    fs::OpenOptions,
    io::{self, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::PathBuf,
};

/// The random bytes of a token. Guessing them is as hard as breaking the token's hash.
const RANDOM_BYTES: usize = 32;

/// The settings of a token that is to be made.
#[derive(Debug, Clone)]
pub struct NewToken {
    tenant: Tenant,
    domain: Option<Domain>,
    role: Role,
    note: Option<String>,
    append: Option<PathBuf>,
}

/// A token that was made. `Debug` does not show it.
pub struct Minted {
    /// The token, which the client sends. It is stored nowhere else.
    pub token: String,
    /// The lines for the tokens file, as TOML.
    pub lines: String,
    /// The file to which the lines were appended.
    pub appended: Option<PathBuf>,
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
            .about("Makes a token. Prints it on stdout, and prints or appends the lines for the tokens file")
            .arg(
                arg("tenant", "TENANT", "Tenant that owns the token's jobs, registrations and quota")
                    .required(true)
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
                arg("role", "ROLE", "Role: reader, user, admin or monitor [default: user]")
                    .value_parser(value_parser!(Role)),
            )
            .arg(arg("note", "TEXT", "Note for people, such as where the token is used"))
            .arg(
                arg("append", "FILE", "Append the lines to this tokens file")
                    .value_parser(value_parser!(PathBuf)),
            ),
    )
}

impl NewToken {
    /// Reads the arguments of [`command`].
    #[must_use]
    pub fn read(matches: &ArgMatches) -> Self {
        let m = matches.subcommand().map_or(matches, |(_, m)| m);
        // The parser requires the argument.
        let tenant = m.get_one::<Tenant>("tenant").cloned().unwrap_or_else(Tenant::default_tenant);
        NewToken {
            tenant,
            domain: m.get_one("domain").cloned(),
            role: m.get_one("role").copied().unwrap_or_default(),
            note: m.get_one("note").cloned(),
            append: m.get_one("append").cloned(),
        }
    }

    /// Makes the token, and appends its lines to the file if there is one.
    ///
    /// # Errors
    /// If the system gives no random bytes, or the file cannot be written.
    pub fn mint(&self) -> io::Result<Minted> {
        let mut random = [0; RANDOM_BYTES];
        rand::rngs::OsRng.try_fill_bytes(&mut random).map_err(io::Error::other)?;
        let token = format!("fletch_{}", hex::encode(random));
        let mut lines = format!(
            "\n[[token]]\nhash = \"{}\"\ntenant = \"{}\"\nrole = \"{}\"\n",
            Hash::of(token.as_bytes()),
            self.tenant,
            self.role
        );
        if let Some(domain) = &self.domain {
            lines += &format!("domain = \"{domain}\"\n");
        }
        if let Some(note) = &self.note {
            lines += &format!("note = {}\n", toml::Value::from(note.as_str()));
        }
        if let Some(file) = &self.append {
            let failed = |e: io::Error| io::Error::new(e.kind(), format!("{}: {e}", file.display()));
            let mut file =
                OpenOptions::new().append(true).create(true).mode(0o600).open(file).map_err(failed)?;
            // One write, so that a server that reads the file meanwhile sees all lines or none.
            file.write_all(lines.as_bytes()).and_then(|()| file.sync_all()).map_err(failed)?;
        }
        Ok(Minted { token, lines, appended: self.append.clone() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::auth::Auth;

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
        assert_ne!(a.token, b.token);
        let auth = Auth::open(Some(&path)).expect("holds together");
        let ask =
            |m: &Minted| auth.authenticate(Some(format!("Bearer {}", m.token).as_bytes())).expect("known");
        assert_eq!((ask(&a).tenant.as_str(), ask(&a).role), ("a", Role::User));
        assert_eq!((ask(&b).domain.as_str(), ask(&b).role), ("d", Role::Admin));
        let file = std::fs::read_to_string(&path).expect("file");
        assert!(!file.contains(&a.token) && !format!("{a:?}").contains(&a.token));
        assert!(command().try_get_matches_from(["token", "new"]).is_err());
    }
}
