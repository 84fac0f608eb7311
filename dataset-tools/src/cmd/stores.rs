//! Which store a bucket's name means to a command, and which folder a path means.
//!
//! 1. What the user writes means the store that the settings or the environment name. If the account read a
//!    bucket of that name at another store before, the URI gets the store's name ([`Context::uri`]).
//! 2. What was remembered means the store that it was read from. If the settings or the environment name
//!    another one, the command ends, before anything is read or handed over ([`Context::remembered_uri`]).
//! 3. The URIs of a server with settings of its own mean what those say ([`Context::uri_at_server`]).

use super::{Context, opened};
use crate::environment;
use crate::failure::Failure;
use crate::meanings::{self, Folder};
use fletch_origin::{OriginConfig, OriginUri};

fn parsed(text: &str) -> Result<OriginUri, Failure> {
    OriginUri::from_arg(text).map_err(|e| Failure::usage(e.to_string()))
}

fn at_store(uri: &OriginUri, store: Option<&str>) -> Result<OriginUri, Failure> {
    uri.at_store(store).map_err(|e| Failure::new(e.to_string()))
}

fn now_names(way: &OriginConfig, uri: &OriginUri, store: &str) -> String {
    environment::now_names(way, uri, &environment::of_process, store)
}

impl Context {
    /// Parses a path or a URI that the user wrote. A store that the settings do not name is opened as the
    /// environment says.
    pub(super) fn uri(&self, text: &str) -> Result<OriginUri, Failure> {
        let written = parsed(text)?;
        if written.store().is_some() {
            return self.remembered_uri(text);
        }
        let Some(way) = self.way_to(&written)? else { return Ok(written) };
        let uri = match (way.store_of(&written), self.recorded_store(&written)) {
            (Some(named), Some(recorded)) if named != recorded => {
                let there = at_store(&written, Some(&named))?;
                self.note_other_store(&there, &recorded, &now_names(&way, &written, &named));
                there
            }
            _ => written,
        };
        self.open_way(&uri, &way)?;
        Ok(uri)
    }

    /// Parses a path or a URI that this account remembered.
    ///
    /// # Errors
    /// The settings or the environment name another store than the one that the URI was read from.
    pub(super) fn remembered_uri(&self, text: &str) -> Result<OriginUri, Failure> {
        let remembered = parsed(text)?;
        // A table of the settings may name the store.
        if remembered.store().is_some() && self.origins().is_configured(&remembered) {
            return Ok(remembered);
        }
        let bare = remembered.without_store();
        let recorded = self.recorded_store(&bare);
        let is_first = remembered.store().is_some() && remembered.store() == recorded.as_deref();
        let uri = if is_first { bare.clone() } else { remembered };
        let Some(way) = self.way_to(&bare)? else { return Ok(uri) };
        let meant = uri.store().map(str::to_owned).or(recorded);
        match (meant, way.store_of(&bare)) {
            (Some(meant), Some(named)) if meant != named => {
                let says = now_names(&way, &bare, &named);
                Err(Failure::new(format!("{uri} was read from {meant}; {says}")).hint(format!(
                    "let it name {meant} for this dataset; or give {bare} for the one at {named}"
                )))
            }
            _ => {
                self.open_way(&uri, &way)?;
                Ok(uri)
            }
        }
    }

    /// Parses a URI of a registration: remembered at the own server, and as the user wrote it at another.
    pub(super) fn registered_uri(&self, text: &str) -> Result<OriginUri, Failure> {
        if self.asks_own_server()? { self.remembered_uri(text) } else { self.uri(text) }
    }

    /// Returns the URI of a path or URI that the user wrote, as the chosen server knows it.
    pub(super) fn uri_at_server(&self, text: &str) -> Result<String, Failure> {
        let uri = self.uri(text)?;
        let written = parsed(text)?;
        // A URI with a store that the user wrote is one of the server's settings.
        let is_theirs = written.store().is_some() && !self.asks_own_server()?;
        if is_theirs { Ok(written.to_string()) } else { self.at_server(&uri) }
    }

    /// Returns a URI as the chosen server knows it.
    pub(super) fn at_server(&self, uri: &OriginUri) -> Result<String, Failure> {
        let known = if self.asks_own_server()? { uri.clone() } else { uri.without_store() };
        Ok(known.to_string())
    }

    /// Returns whether the server that is asked is the user's own, which `fletch mount` starts if none runs.
    pub(super) fn asks_own_server(&self) -> Result<bool, Failure> {
        match self.chosen()? {
            Some(server) => Ok(server.is_own()),
            None => Ok(true),
        }
    }

    /// Records that the plain URIs of these datasets and places mean the stores of now.
    ///
    /// # Errors
    /// Another command did so for another store at this moment.
    pub(super) fn claim(&self, uris: &[&OriginUri]) -> Result<(), Failure> {
        let Some(state_dir) = &self.state_dir else { return Ok(()) };
        for uri in uris {
            let (Some(top), None) = (uri.top(), uri.store()) else { continue };
            let Some(named) = self.way_to(uri)?.and_then(|way| way.store_of(uri)) else { continue };
            let is_new = meanings::store(state_dir, &top).is_none();
            if is_new && !self.written(uri).is_empty() {
                self.out.note(format_args!(
                    "{uri} was read by an older fletch, which did not note from which store; from now on \
                     {top} is the one at {named}"
                ));
            }
            match meanings::claim(state_dir, &top, &named) {
                Ok(recorded) if recorded == named => {}
                Ok(recorded) => {
                    return Err(Failure::new(format!("another command just read {top} from {recorded}"))
                        .hint("run this command again"));
                }
                Err(e) => {
                    self.out.warn(format_args!("cannot remember that {top} is the one at {named}: {e}"));
                }
            }
        }
        Ok(())
    }

    /// Returns how the folder at a local URI differs from the one that this account read there last; `None`
    /// if it is the same, or if nothing is known.
    pub(super) fn another_folder(&self, uri: &OriginUri) -> Option<String> {
        let dir = uri.as_local()?;
        let recorded = meanings::folder(self.state_dir.as_deref()?, uri)?;
        recorded.difference(&Folder::at(dir).ok()?)
    }

    /// Warns once if another folder is at a local URI than the one that this account read there last.
    pub(super) fn warn_of_another_folder(&self, uri: &OriginUri) {
        let mut noted = self.noted.lock();
        if let (Some(dir), Some(difference)) = (uri.as_local(), self.another_folder(uri))
            && noted.insert(uri.clone())
        {
            let shown = dir.display();
            self.out.warn(format_args!("{shown} is not the folder that was read before: {difference}"));
        }
    }

    /// Records the folder at a local URI, if a build that recorded none read it.
    pub(super) fn adopt_folder(&self, uri: &OriginUri) {
        let (Some(state_dir), Some(dir)) = (&self.state_dir, uri.as_local()) else { return };
        if meanings::folder(state_dir, uri).is_some() {
            return;
        }
        let done = Folder::at(dir).and_then(|folder| meanings::remember_folder(state_dir, uri, folder));
        if let Err(e) = done {
            self.out.warn(format_args!("cannot remember which folder {} is: {e}", dir.display()));
        }
    }

    fn recorded_store(&self, uri: &OriginUri) -> Option<String> {
        meanings::store(self.state_dir.as_deref()?, &uri.top()?)
    }

    /// Returns how a plain URI is reached: as the settings say, else as the environment says.
    fn way_to(&self, uri: &OriginUri) -> Result<Option<OriginConfig>, Failure> {
        match self.origin_config(uri) {
            Some(config) => Ok(Some(config)),
            None => environment::config_of(uri, &environment::of_process),
        }
    }

    /// Lets a URI be opened in this way.
    fn open_way(&self, uri: &OriginUri, way: &OriginConfig) -> Result<(), Failure> {
        let mut reach = self.reach.lock();
        if reach.origins.is_configured(uri) {
            return Ok(());
        }
        let prefix = at_store(&parsed(&way.prefix)?, uri.store())?.to_string();
        let mut configs = reach.configs.clone();
        configs.push(OriginConfig { prefix, ..way.clone() });
        reach.origins = opened(&configs)?;
        reach.configs = configs;
        Ok(())
    }

    /// Says once for each bucket that its name means another store than before.
    fn note_other_store(&self, uri: &OriginUri, recorded: &str, says: &str) {
        let Some(top) = uri.top() else { return };
        let mut noted = self.noted.lock();
        if noted.insert(top.clone()) {
            let bare = top.without_store();
            self.out.note(format_args!("{bare} was read from {recorded}; {says}: that is {top}"));
        }
    }
}
