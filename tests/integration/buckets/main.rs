//! Buckets as people have them: every form of listing, key, tag and time, outages, and folders of consoles.
//!
//! A form is a bucket with the manners of some store, and the right answer: these entries, or a fault that
//! names the key. No command ends with 0 and fewer entries.
//!
//! `make test` indexes every form, verifies some and mounts some. With `FLETCH_BUCKETS=full`, which
//! `make accept-buckets` sets, every form is also verified, refreshed, packed and mounted.

mod bucket;
mod consoles;
mod folders;
mod form;
mod gcs;
mod keys;
mod listings;
mod long_listing;
mod outages;
mod processes;
mod tags;
mod transient;
mod two_stores;
