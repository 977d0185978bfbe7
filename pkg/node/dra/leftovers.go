package dra

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/go-logr/logr"

	"github.com/opiproject/xpu-device-plugin/api/v1alpha1"
	"github.com/opiproject/xpu-device-plugin/pkg/loop"
	"github.com/opiproject/xpu-device-plugin/pkg/node/journal"
)

// Leftovers are the files that package kubeletplugin writes about the devices of a prepared claim (KEP-5304) and has not
// taken away: it writes them at the end of a Prepare, also of one that the kubelet has given up and whose claim it has
// unprepared by then. Their names are the library's (metadata.go of k8s.io/dynamic-resource-allocation/kubeletplugin).
type Leftovers struct {
	// DriverDir is the directory of the driver, with one for each claim by namespace and name in a directory of its own.
	// CDIDir has files by the claim's UID.
	DriverDir, CDIDir string
	// Claims are what the journal knows. A claim that is being prepared is in it before anything is written.
	Claims func() []journal.Attachment
	Log    logr.Logger
}

// metadataPrefix is what the library's CDI files begin with; the UID of their claim follows.
const metadataPrefix = v1alpha1.GroupName + "_metadata_"

// leftoversEvery is how often files are looked for. They are small, and in nobody's way.
const leftoversEvery = time.Minute

// Run removes files at once and every now and then until ctx ends.
func (l *Leftovers) Run(ctx context.Context) error {
	for {
		if err := l.Remove(); err != nil {
			l.Log.Error(err, "Files that nobody needs any more remain", "retry", leftoversEvery.String())
		}
		if !loop.Sleep(ctx, leftoversEvery) {
			return nil
		}
	}
}

// Remove removes what belongs to no claim that is prepared. It may be called at any time.
func (l *Leftovers) Remove() error {
	files, err1 := filepath.Glob(filepath.Join(l.CDIDir, metadataPrefix+"*.json"))
	// What the library was writing when the agent was killed.
	unfinished, err2 := filepath.Glob(filepath.Join(l.CDIDir, "."+metadataPrefix+"*.tmp"))
	directories, err3 := filepath.Glob(filepath.Join(l.DriverDir, "dra-device-metadata", "*_*"))
	errs := []error{err1, err2, err3}
	// The journal is read after the files: what is written from here on is of a claim that is in it.
	prepared := map[string]bool{} // UIDs, and names as the directories have them
	for _, a := range l.Claims() {
		prepared[string(a.Claim.UID)], prepared[a.Claim.Namespace+"_"+a.Claim.Name] = true, true
	}
	for _, path := range slices.Concat(files, unfinished, directories) {
		claim := filepath.Base(path)
		if ofFile, isFile := strings.CutPrefix(strings.TrimPrefix(claim, "."), metadataPrefix); isFile {
			claim, _, _ = strings.Cut(ofFile, "_")
		}
		if !prepared[claim] {
			errs = append(errs, os.RemoveAll(path)) // no error if it is gone already
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("metadata of claims that are gone: %w", err)
	}
	return nil
}
