// SPDX-License-Identifier: Apache-2.0

package journal_test

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	bolt "go.etcd.io/bbolt"

	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
	"github.com/opiproject/xpu-device-plugin/test/must"
)

// restored returns the record of a Function whose hooks run.
func restored() journal.Attachment {
	a := full(vf1)
	a.State, a.RestoredAt = journal.Releasing, time.Unix(1e9+3, 0).UTC()
	a.Hooks = &journal.Hooks{
		Done: []string{"port"}, Next: "10-a", Attempts: 3, Error: "exit status 75",
		RetryAt: time.Unix(1e9+4, 0).UTC(),
	}
	return a
}

func TestDeadLettersAreKept(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	j := open(t, path)
	must.Succeed(t, j.Put(restored()))
	next := restored()
	next.Hooks = &journal.Hooks{Done: []string{"port", "10-a"}, Next: "20-b"}
	const written, kept = 105, 100
	for n := range written {
		must.Succeed(t, j.GiveUp(journal.DeadLetter{
			Hook: fmt.Sprintf("%d", n), Attachment: restored(), Attempts: 10,
			Error: "exit status 75", At: time.Unix(1e9+5, 0).UTC(),
		}, next))
	}

	check := func(j *journal.Journal) {
		t.Helper()
		letters := j.DeadLetters()
		if len(letters) != kept {
			t.Fatalf("%d dead letters, want %d", len(letters), kept)
		}

		for i, letter := range letters {
			a := restored()
			a.Hooks = nil
			want := journal.DeadLetter{Hook: fmt.Sprintf("%d", written-kept+i), Attachment: a,
				Attempts: 10, Error: "exit status 75", At: time.Unix(1e9+5, 0).UTC()}
			if diff := cmp.Diff(want, letter, comparePrefixes); diff != "" {
				t.Fatalf("dead letter %d (-want +got):\n%s", i, diff)
			}
		}

		if a, _ := j.Get(vf1); !cmp.Equal(next, a, comparePrefixes) {
			t.Errorf("attachment (-want +got):\n%s", cmp.Diff(next, a, comparePrefixes))
		}
	}

	check(j)
	must.Succeed(t, j.Close())
	j = open(t, path)
	check(j)

	next.State = journal.Reserved
	if err := j.GiveUp(journal.DeadLetter{Attachment: restored()}, next); err == nil ||
		!strings.Contains(err.Error(), "hooks must be empty") {
		t.Errorf("error %v, want one about the state", err)
	}

	must.Succeed(t, j.Close())
	next.State = journal.Releasing
	if err := j.GiveUp(journal.DeadLetter{Attachment: restored()}, next); err == nil {
		t.Error("written to a closed journal")
	}
	if last := j.DeadLetters()[kept-1].Hook; last != "104" {
		t.Errorf("last dead letter %s, want what is on the disk", last)
	}
}

// A file of the first version has no dead letters, and its records lack later fields.
func TestOpenFirstVersion(t *testing.T) {
	path := filepath.Join(t.TempDir(), "j")
	must.Succeed(t, open(t, path).Close())
	db, err := bolt.Open(path, 0o600, nil)
	must.Succeed(t, err)

	must.Succeed(t, db.Update(func(tx *bolt.Tx) error {
		must.Succeed(t, tx.Bucket([]byte("attachments")).Put([]byte("0000:3b:02.1"),
			[]byte(
				`{"function":"0000:3b:02.1","pf":"0000:3b:00.0","state":"Releasing","reservedAt":"2001-09-09T01:46:40Z"}`,
			)))
		return tx.DeleteBucket([]byte("deadLetters"))
	}))

	must.Succeed(t, db.Close())
	for range 2 {
		j := open(t, path)
		a, exists := j.Get(vf1)
		if !exists || a.Restored() || len(j.DeadLetters()) > 0 {
			t.Errorf("attachment %+v, dead letters %v", a, j.DeadLetters())
		}

		must.Succeed(t, j.GiveUp(journal.DeadLetter{Hook: "h", Attachment: restored()}, restored()))
		must.Succeed(t, j.Delete(vf1))
		must.Succeed(t, j.Put(a))
		must.Succeed(t, j.Close())
		db, err := bolt.Open(path, 0o600, nil)
		must.Succeed(t, err)
		must.Succeed(t, db.Update(func(tx *bolt.Tx) error {
			return tx.DeleteBucket([]byte("deadLetters"))
		}))
		must.Succeed(t, db.Close())
	}
}

func TestSubscribe(t *testing.T) {
	j := open(t, filepath.Join(t.TempDir(), "j"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()

	changes := j.Subscribe(ctx)
	for name, write := range map[string]func() error{
		"put": func() error { return j.Put(full(vf1)) },
		"give up": func() error {
			return j.GiveUp(journal.DeadLetter{Attachment: restored()}, restored())
		},
		"delete": func() error { return j.Delete(vf1) },
	} {
		if name == "delete" {
			must.Succeed(t, j.Put(full(vf1)))
			<-changes
		}

		must.Succeed(t, write())
		select {
		case <-changes:
		default:
			t.Errorf("%s: nobody was woken", name)
		}
	}

	must.Succeed(t, j.Delete(vf2)) // the Function is free already
	select {
	case <-changes:
		t.Error("woken by nothing")
	default:
	}
}

func TestLastUse(t *testing.T) {
	if use, ok := reserved(vf1).LastUse(); !ok || use.Sandbox != "sandbox-1" ||
		!use.AttachedAt.Equal(time.Unix(1e9+1, 0)) || !use.StoppedAt.Equal(time.Unix(1e9+2, 0)) {
		t.Errorf("last use %+v, %t; want the one that ended", use, ok)
	}
	if use, ok := reserved(vf1).BackToReserved().LastUse(); !ok || use.Sandbox != "sandbox-1" {
		t.Errorf("last use %+v, %t; want the one that ended", use, ok)
	}

	again := reserved(vf1)
	again.Sandbox = "sandbox-2"
	if use, _ := again.LastUse(); use.Sandbox != "sandbox-2" || !use.StoppedAt.IsZero() {
		t.Errorf("last use %+v, want the present one", use)
	}
	if use, ok := (journal.Attachment{}).LastUse(); ok {
		t.Errorf("last use %+v of what was never used", use)
	}
}
