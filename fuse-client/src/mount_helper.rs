//! `mount.fletch`: the program under the name by which mount(8) calls it, for lines of fstab.
//!
//! mount(8) calls `mount.fletch DATASET DIR [-sfnv] [-N NAMESPACE] [-o OPTIONS] [-t TYPE]`. An option is the
//! name of a flag of `fletch-mount`, with `_` or `-` between its words. What other file systems
//! understand as well (`nofail`, `_netdev`, `noatime`) means nothing here and is ignored. mount(8) separates
//! options by commas, so each server of a list has an option `server` of its own.

use clap::{Arg, CommandFactory as _};
use std::{
    ffi::{OsStr, OsString},
    path::Path,
};

use crate::cli::Cli;
use fletch_client::server_choice::SYSTEM_SOCKET;

/// The name of the program as a helper.
pub const HELPER: &str = "mount.fletch";

/// Options of mount(8) that have no meaning for a read-only mount of a dataset. mount(8) adds `rw` by itself.
const IGNORED: &[&str] = &[
    "_netdev",
    "async",
    "atime",
    "auto",
    "defaults",
    "dev",
    "diratime",
    "exec",
    "group",
    "lazytime",
    "loud",
    "noatime",
    "noauto",
    "nodev",
    "nodiratime",
    "noexec",
    "nofail",
    "nogroup",
    "nolazytime",
    "noowner",
    "norelatime",
    "nostrictatime",
    "nosuid",
    "nouser",
    "nousers",
    "owner",
    "relatime",
    "ro",
    "rw",
    "silent",
    "strictatime",
    "suid",
    "sync",
    "user",
    "users",
];

/// Flags that a line of fstab does not set: the helper always mounts one dataset, in the background.
const NO_OPTIONS: &[&str] = &[
    "daemon",
    "foreground",
    "help",
    "version",
    "datasets",
    "tags",
    "keep",
    "mounts-max",
    "interval",
    "ready-file",
    "hold",
    "hold-below",
    "hold-for",
    "status",
    "json",
];

/// The flag that names the server.
const SERVER: &str = "--server=";

fn is_server(arg: &OsString) -> bool {
    arg.to_string_lossy().starts_with(SERVER)
}

/// Words that the helper cannot use.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HelperError {
    /// The dataset or the directory is missing, or there are more words.
    #[error(
        "usage: mount.fletch DATASET DIR [-sfnv] [-o OPTIONS], or in fstab: \
         DATASET DIR fletch server=http://HOST:7380,allow_other,_netdev,nofail 0 0"
    )]
    Usage,
    /// An option that no flag has.
    #[error("unknown mount option {option:?}; the options are the flags of fletch-mount: {known}")]
    Unknown {
        /// The option.
        option: String,
        /// The options that exist.
        known: String,
    },
    /// An option that needs a value.
    #[error("mount option {0:?} needs a value: {0}=VALUE")]
    NoValue(String),
}

/// What the helper does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HelperCall {
    /// The arguments of `fletch-mount`.
    pub args: Vec<OsString>,
    /// Whether to check the words only (`-f`).
    pub is_fake: bool,
}

/// Returns whether the program was called as a helper, by its own name.
#[must_use]
pub fn is_helper(program: Option<&OsStr>) -> bool {
    program.and_then(|p| Path::new(p).file_name()).is_some_and(|name| name == HELPER)
}

/// Translates the words after the program's name into arguments of `fletch-mount`.
///
/// # Errors
/// [`HelperError`].
pub fn translate(words: impl IntoIterator<Item = OsString>) -> Result<HelperCall, HelperError> {
    let mut words = words.into_iter();
    let (mut places, mut options, mut is_fake, mut is_sloppy) = (Vec::new(), Vec::new(), false, false);
    while let Some(word) = words.next() {
        let text = word.to_string_lossy();
        match text.strip_prefix('-').filter(|letters| !letters.is_empty()) {
            None => places.push(word),
            Some("o") => {
                let value = words.next().ok_or(HelperError::Usage)?;
                options.extend(value.to_string_lossy().split(',').map(str::to_owned));
            }
            Some("t" | "N") => {
                words.next().ok_or(HelperError::Usage)?;
            }
            Some(letters) if letters.chars().all(|c| "sfnvw".contains(c)) => {
                is_fake |= letters.contains('f');
                is_sloppy |= letters.contains('s');
            }
            Some(_) => return Err(HelperError::Usage),
        }
    }
    let [dataset, dir] = <[OsString; 2]>::try_from(places).map_err(|_| HelperError::Usage)?;
    let mut args: Vec<OsString> = vec![dataset, dir, "--daemon".into()];
    for option in options.iter().filter(|o| !o.is_empty()) {
        match flag(option) {
            Ok(Some(flag)) => match (flag.strip_prefix(SERVER), args.iter_mut().find(|arg| is_server(arg))) {
                (Some(next), Some(servers)) => {
                    servers.push(",");
                    servers.push(next);
                }
                _ => args.push(flag.into()),
            },
            Ok(None) => {}
            Err(HelperError::Unknown { .. }) if is_sloppy => {}
            Err(e) => return Err(e),
        }
    }
    let names_source = |arg: &OsString| {
        let arg = arg.to_string_lossy();
        arg.starts_with(SERVER) || arg.starts_with("--tables=") || arg.starts_with("--config=")
    };
    if !args.iter().any(names_source) {
        args.push(format!("--server=unix:{SYSTEM_SOCKET}").into());
    }
    Ok(HelperCall { args, is_fake })
}

/// Returns the flag of an option; `None` if the option is ignored.
fn flag(option: &str) -> Result<Option<String>, HelperError> {
    let (key, value) = option.split_once('=').map_or((option, None), |(k, v)| (k, Some(v)));
    // `x-systemd.automount` and its like are for other programs.
    if IGNORED.contains(&key) || key.starts_with("x-") || key.starts_with("X-") || key == "comment" {
        return Ok(None);
    }
    let name = key.replace('_', "-");
    let command = Cli::command();
    let is_option = |a: &&Arg| a.get_long().is_some_and(|long| !NO_OPTIONS.contains(&long));
    let known: Vec<&Arg> = command.get_arguments().filter(is_option).collect();
    let Some(argument) = known.iter().find(|a| a.get_long() == Some(&name)) else {
        let known: Vec<String> = known.iter().filter_map(|a| Some(a.get_long()?.replace('-', "_"))).collect();
        return Err(HelperError::Unknown { option: key.to_owned(), known: known.join(", ") });
    };
    let needs_value = argument.get_num_args().is_none_or(|n| n.min_values() > 0);
    match value {
        Some(value) => Ok(Some(format!("--{name}={value}"))),
        None if needs_value => Err(HelperError::NoValue(key.to_owned())),
        None => Ok(Some(format!("--{name}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    fn call(words: &[&str]) -> Result<HelperCall, HelperError> {
        translate(words.iter().map(OsString::from))
    }

    #[test]
    fn a_line_of_fstab_becomes_flags() {
        let options = "rw,server=unix:/run/fletch/server.sock,allow_other,_netdev,cache_size=10%,\
                       x-systemd.automount,nofail,io-timeout=5s";
        let made = call(&["photos@v2", "/mnt/photos", "-v", "-o", options]).expect("a line");
        assert_eq!(
            made.args,
            [
                "photos@v2",
                "/mnt/photos",
                "--daemon",
                "--server=unix:/run/fletch/server.sock",
                "--allow-other",
                "--cache-size=10%",
                "--io-timeout=5s"
            ]
        );
        assert!(!made.is_fake);
        let listed = call(&["photos", "/mnt", "-o", "server=http://a:1,nofail,server=http://b:2"]);
        assert_eq!(listed.expect("a line").args[3..], ["--server=http://a:1,http://b:2"]);
        let plain = call(&["photos", "/mnt"]).expect("a line");
        assert_eq!(plain.args[3..], ["--server=unix:/run/fletch/server.sock"]);
        let words = std::iter::once(OsString::from("fletch-mount")).chain(made.args);
        let cli = Cli::try_parse_from(words).expect("flags of the program");
        assert_eq!(
            (cli.dataset.as_deref(), cli.allow_other, cli.daemon),
            (Some("photos@v2"), Some(true), true)
        );
    }

    #[test]
    fn options_that_no_flag_has_are_named() {
        let unknown = call(&["photos", "/mnt", "-o", "sever=x"]).expect_err("no such flag").to_string();
        assert!(unknown.contains("\"sever\"") && unknown.contains("server, token_file"), "{unknown}");
        assert!(call(&["photos", "/mnt", "-s", "-o", "sever=x"]).is_ok(), "-s is sloppy");
        assert!(call(&["photos", "/mnt", "-o", "daemon"]).is_err());
        let lacking = call(&["photos", "/mnt", "-o", "server"]).expect_err("a value").to_string();
        assert!(lacking.contains("server=VALUE"), "{lacking}");
        for words in [&["photos"][..], &["a", "b", "c"], &["a", "b", "-o"], &["a", "b", "-q"], &[]] {
            assert_eq!(call(words), Err(HelperError::Usage), "{words:?}");
        }
    }

    #[test]
    fn the_name_of_the_program_decides() {
        let of = |name: &str| is_helper(Some(OsStr::new(name)));
        assert!(of("/sbin/mount.fletch") && of("mount.fletch"));
        assert!(!of("/usr/bin/fletch-mount") && !is_helper(None));
        assert!(call(&["a", "b", "-fn", "-t", "fuse.fletch", "-N", "1"]).expect("words").is_fake);
    }
}
