//! Entity tags whose form differs between listing and answer, or changes after the index.

use crate::form::{Form, check};
use fletch_testkit::{Described, Manners, TagForm};

fn tags(listed: TagForm, answered: TagForm) -> Manners {
    let described = |tag| Described { tag, ..Described::default() };
    Manners { listed: described(listed), answered: described(answered), ..Manners::default() }
}

#[test]
fn tags_in_listings_and_answers() {
    use TagForm::{Absent, Empty, Multipart, Quoted, Unquoted, UpperCase, Weak};
    let keys = ["a", "b/c", "e()"];
    let shown = ["a", "b/c", "e"];
    let form =
        |name, listed, answered| Form::entries(name, &keys, &shown).with(tags(listed, answered)).verified();
    check(&[
        form("listed without quotes", Unquoted, Quoted).mounted(),
        form("answered without quotes", Quoted, Unquoted),
        form("without quotes anywhere", Unquoted, Unquoted),
        form("listed as weak", Weak, Quoted),
        form("answered as weak", Quoted, Weak).mounted(),
        form("weak everywhere", Weak, Weak),
        form("listed in upper case", UpperCase, Quoted),
        form("answered in upper case", Quoted, UpperCase),
        form("listed as of a multipart upload", Multipart, Quoted),
        form("answered as of a multipart upload", Quoted, Multipart).mounted(),
        form("not listed", Absent, Quoted),
        form("not answered", Quoted, Absent).mounted(),
        form("listed as an empty text", Empty, Quoted),
        form("answered as an empty text", Quoted, Empty),
        form("no tags anywhere", Absent, Absent),
        form("other tags after the index", Quoted, Quoted).later(tags(Multipart, Multipart)).mounted(),
    ]);
}
