//! Parses the command line, and says for a word of another tool what Fletch calls the command.

use super::{Cli, help};
use crate::failure::Failure;
use clap::FromArgMatches;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use std::ffi::OsString;

/// Words that people try, and what to run instead.
const WORDS: &[(&[&str], &str)] = &[
    (
        &["serve", "server", "daemon", "start"],
        "`fletch mount` starts a server of your own; for a shared one see `fletch-server --help`",
    ),
    (&["stop", "shutdown", "quit"], "`fletch down` unmounts what you mounted and stops your server"),
    (&["update", "sync", "reindex"], "`fletch refresh NAME` reads what is new or changed"),
    (
        &["umount", "unmount", "fusermount"],
        "unmount with `fusermount3 -u DIR`; `fletch down` ends all mounts of yours, and your server",
    ),
    (
        &["list", "dir", "find"],
        "`fletch ls SOURCE` lists a version, `fletch datasets` what a server has registered",
    ),
    (&["add", "import", "create", "new"], "`fletch index SOURCE`, then `fletch register NAME SOURCE`"),
    (
        &["remove", "rm", "delete", "del"],
        "`fletch unregister NAME` removes a dataset from the server, `fletch erase NAME PATH` a deleted file",
    ),
    (&["info", "describe", "stat", "cat"], "`fletch show SOURCE [PATH]` describes a version or an entry"),
    (&["stats", "health", "ps"], "`fletch status` shows the server"),
    (&["job"], "`fletch jobs list`, `fletch jobs show NAME`, `fletch jobs delete NAME`"),
    (&["cache", "fetch", "prefetch", "warm", "pull", "download"], "`fletch warmup NAME` fills the cache"),
    (&["drop", "purge", "clear"], "`fletch evict NAME` evicts a dataset from the cache"),
    (&["clean", "prune", "expire", "vacuum"], "`fletch gc SOURCE` deletes versions that nobody uses"),
    (&["check", "fsck", "scrub", "validate"], "`fletch verify SOURCE` reads and checks every object"),
    (&["tags", "versions", "log", "history"], "`fletch tag SOURCE` lists the tagged versions"),
    (&["compare"], "`fletch diff SOURCE@TAG SOURCE@TAG` compares two versions"),
];

/// Why a command line starts no command.
#[derive(Debug)]
pub enum Unparsed {
    /// The help, the version, or a usage error, as the parser words it.
    Clap(clap::Error),
    /// A word that is no command, with what to run instead.
    Word(Failure),
}

/// Parses the words of a command line, the first of which is the program.
///
/// # Errors
/// [`Unparsed`].
pub fn parse(args: impl IntoIterator<Item = OsString>) -> Result<Cli, Unparsed> {
    let mut args: Vec<OsString> = args.into_iter().collect();
    // `fletch help index` is `fletch index --help`.
    if args.get(1).is_some_and(|word| word == "help") {
        args.remove(1);
        args.push("--help".into());
    }
    let matches = help::command().try_get_matches_from(args).map_err(refused)?;
    Cli::from_arg_matches(&matches).map_err(Unparsed::Clap)
}

fn refused(error: clap::Error) -> Unparsed {
    let word = match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
        (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word))) => word,
        _ => return Unparsed::Clap(error),
    };
    match WORDS.iter().find(|(words, _)| words.contains(&word.as_str())) {
        Some((_, advice)) => {
            Unparsed::Word(Failure::usage(format!("`fletch {word}` is no command")).hint(*advice))
        }
        None => Unparsed::Clap(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(line: &str) -> Result<Cli, Unparsed> {
        parse(line.split(' ').map(Into::into))
    }

    #[test]
    fn words_of_other_tools_are_no_commands_and_have_advice() {
        let top = help::command();
        for (words, _) in WORDS {
            for word in *words {
                assert!(top.find_subcommand(word).is_none(), "{word} is a command");
                let refused = parsed(&format!("fletch {word} x"));
                assert!(matches!(refused, Err(Unparsed::Word(_))), "{word}: {refused:?}");
            }
        }
        assert!(matches!(parsed("fletch lss"), Err(Unparsed::Clap(_))), "the parser knows the nearest");
    }

    #[test]
    fn to_is_another_name_of_tables() {
        for option in ["--to", "--tables"] {
            for command in ["index", "pack"] {
                let line = format!("fletch {command} data {option} elsewhere");
                assert!(parsed(&line).is_ok(), "{line}");
            }
        }
    }

    #[test]
    fn help_is_asked_for_in_two_ways() {
        for line in ["fletch help index", "fletch index --help", "fletch help", "fletch -h"] {
            match parsed(line) {
                Err(Unparsed::Clap(e)) => assert_eq!(e.kind(), ErrorKind::DisplayHelp, "{line}"),
                other => panic!("{line}: {other:?}"),
            }
        }
    }
}
