// SPDX-License-Identifier: Apache-2.0

package cniserver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/opiproject/xpu-device-plugin/cni/wire"
	"github.com/opiproject/xpu-device-plugin/pkg/kernel/watchdir"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
)

const (
	// spoolParallel is the number of requests of the spool that are handled in parallel.
	spoolParallel = 8
	// spoolTimeout limits one of these requests.
	spoolTimeout = 30 * time.Second
	// firstTimeout limits the handling of the spool at the start. The remaining requests are
	// retried later.
	firstTimeout = 10 * time.Second
	// Pauses before failed requests are retried.
	firstRetry, slowestRetry = time.Second, time.Minute
	// badDir is the directory in the spool for files that are no requests.
	badDir = "bad"
)

// watchSpool creates the directory if it is missing, and watches it.
func (s *Server) watchSpool(changes *watchdir.Dir) error {
	isOwn := func(name string) bool {
		return name == badDir || strings.HasSuffix(name, ".json") || strings.HasPrefix(name, ".")
	}
	for _, dir := range []string{s.SpoolDir, filepath.Join(s.SpoolDir, badDir)} {
		if err := makePrivateDir(dir, isOwn); err != nil {
			return err
		}
	}

	return changes.Watch()
}

// followSpool handles new requests, and failed requests again after a pause, until ctx ends.
func (s *Server) followSpool(ctx context.Context, changes *watchdir.Dir) error {
	// The first pass is for requests that came during the start.
	for backoff := loop.Backoff(firstRetry, slowestRetry); ; {
		var pause time.Duration
		if s.drainSpool(ctx, changes) {
			backoff = loop.Backoff(firstRetry, slowestRetry)
		} else {
			pause = backoff.Step()
		}

		if !loop.Wait(ctx, changes.Changes(), pause) {
			return nil
		}
	}
}

// isRequest reports whether a file of this name is a request that the shim has completely written.
func isRequest(name string) bool {
	return strings.HasSuffix(name, ".json") && !strings.HasPrefix(name, ".")
}

// spooled is a file of the spool.
type spooled struct {
	path string
	// info is the state of the file when it was read.
	info    fs.FileInfo
	request wire.Request
}

// order compares the times at which the runtime made two requests. Requests of earlier boots and of
// older shims come first, ordered by the clock. Requests of this boot follow, ordered by the time
// since the boot, which does not depend on the clock.
func (s *Server) order(a, b wire.Request) int {
	aNow, bNow := a.Asked.BootID == s.BootID && a.Asked.Known(), b.Asked.BootID == s.BootID &&
		b.Asked.Known()
	switch {
	case aNow && bNow:
		return cmp.Compare(a.Asked.Since, b.Asked.Since)
	case aNow:
		return 1
	case bNow:
		return -1
	}

	return a.At.Compare(b.At)
}

// drainSpool handles the requests in the spool in their order, and reports whether none is left.
func (s *Server) drainSpool(ctx context.Context, changes *watchdir.Dir) (empty bool) {
	var entries []fs.DirEntry
	err := s.watchSpool(changes)
	if err == nil {
		entries, err = os.ReadDir(s.SpoolDir)
	}
	if err != nil {
		s.Log.Error(err, "CNI spool cannot be read; trying again", "spool", s.SpoolDir)
		return false
	}

	var files []spooled
	unread := false
	for _, entry := range entries {
		if !isRequest(entry.Name()) {
			continue
		}

		file, err := s.readSpooled(entry)
		switch {
		case errors.Is(err, fs.ErrNotExist): // the file was removed
		case errors.As(err, new(*fs.PathError)): // for example, no file descriptor is left
			unread = true
			s.Log.Error(err, "File in the CNI spool cannot be read; trying again", "file", file.path)
		case err != nil:
			s.putAside(file.path, err)
		default:
			files = append(files, file)
		}
	}

	slices.SortStableFunc(files, func(a, b spooled) int { return s.order(a.request, b.request) })
	s.Metrics.spool.Set(float64(len(files)))
	var group errgroup.Group
	group.SetLimit(spoolParallel)

	for _, file := range files {
		group.Go(func() error { return s.handleSpooled(ctx, file) })
	}

	err = group.Wait()
	return err == nil && !unread
}

// readSpooled reads one file. An [fs.PathError] means that the file cannot be read now. Any other
// error means that the file will never be a valid request. A request of a later version is no
// error, but waits for an agent that knows it.
func (s *Server) readSpooled(entry fs.DirEntry) (file spooled, err error) {
	file.path = filepath.Join(s.SpoolDir, entry.Name())
	if file.info, err = entry.Info(); err != nil {
		return file, err
	}
	if !file.info.Mode().IsRegular() {
		return file, errors.New("is no regular file")
	}

	content, err := os.Open(file.path)
	if err != nil {
		return file, err
	}
	defer content.Close()

	if file.request, err = readRequest(content); err != nil {
		return file, err
	}

	switch r := file.request; {
	case r.Version > wire.Version:
		return file, nil
	case r.Version < wire.Version:
		return file, fmt.Errorf("version %d: is not known any more", r.Version)
	case r.Command != wire.Del && r.Command != wire.GC:
		return file, fmt.Errorf("command %q: must be DEL or GC", r.Command)
	case r.At.IsZero():
		return file, errors.New("at: is missing")
	}

	return file, checkEnvironment(file.request)
}

// putAside moves a file that is no request to a directory in which an administrator can look at it.
func (s *Server) putAside(path string, reason error) {
	to := filepath.Join(s.SpoolDir, badDir, filepath.Base(path))
	log := s.Log.WithValues("file", path, "movedTo", to)
	s.Metrics.badFile.Inc()

	if err := os.Rename(path, to); err != nil {
		log.Error(errors.Join(reason, err),
			"File in the CNI spool is no request, and cannot be moved away")
		return
	}

	log.Error(reason, "File in the CNI spool is no request; a pod's interface may not be "+
		"released until the next GC")
}

// handleSpooled handles one request, and then removes its file, unless a later request has replaced
// the file in the meantime.
func (s *Server) handleSpooled(ctx context.Context, file spooled) error {
	ctx, cancel := context.WithTimeout(ctx, spoolTimeout)
	defer cancel()

	if reply := s.handle(ctx, file.request, s.madeAfter(file.request)); reply.Error != nil {
		return reply.Error
	}

	now, err := os.Lstat(file.path)
	if err == nil && !(os.SameFile(now, file.info) && now.ModTime().Equal(file.info.ModTime())) {
		return errors.New("was replaced by a later request")
	}

	if err := os.Remove(file.path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.Log.Error(err, "Request in the CNI spool is done, but its file cannot be removed",
			"file", file.path)
		return err
	}

	s.Metrics.spooled.Inc()
	s.Metrics.spool.Dec()

	return nil
}
